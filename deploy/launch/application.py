"""Deploys the application from Python. Common mistakes are found before the start, and reported in one line.

Knows checkpoints on disk and Serve's status; `deploy.app` defines the application.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from core.config import FleetConfig, ServiceConfig
from core.errors import StartupError, Unavailable, first_line
from deploy.api import Authenticator, tokens_path
from deploy.app import APPLICATION, ENGINES, Engines, build_with
from deploy.checkpoints import check_models
from deploy.link.tls import Certificates
from deploy.serve import check_devices
from deploy.settings import single_models
from orchestrator.guessers import Guessers
from orchestrator.text import Tokenizer

TRACE = "  File "
"""Start of the lines of a Python traceback that name a file."""
STATUS_PERIOD_S = 0.3
WIND_DOWN_TIMEOUT_S = 5.0
"""Seconds for all orchestrators to answer."""


def check_pair(config: ServiceConfig) -> None:
    """Check what the settings name before anything is started: models, vocabularies, keys, certificates, the learning
    buffer and the corpus. Raises: StartupError.
    """
    from workers.live import check_buffer  # imports torch

    Authenticator(tokens_path(config.orchestrator.tokens_file))
    own = {} if config.draft is None else {"draft": config.draft}
    workers = {**own, **{f"extra_drafts.{number}": draft for number, draft in enumerate(config.extra_drafts)}}
    drafts = {f"{name}.engine.model": worker.engine for name, worker in workers.items()}
    check_models(config.target.engine, drafts, "target.engine.model")
    for engine in (config.target.engine, *drafts.values()):
        Certificates.of(engine.link_tls)
    if config.target.engine.learning_buffer is not None:
        check_buffer(Path(config.target.engine.learning_buffer))
    if config.speculation.retrieval_index is not None:
        Guessers.open(config.speculation, Tokenizer.from_directory(config.target.engine.model))


def check_fleet(fleet: FleetConfig) -> None:
    """Check the devices of a fleet, and each model as `check_pair` does. Raises: StartupError."""
    check_devices(fleet)
    for model in single_models(fleet):
        check_pair(model)


def run(
    config: ServiceConfig | FleetConfig, report: Callable[[str], None] = lambda _: None, engines: Engines = ENGINES
) -> None:
    """Deploy on the cluster that this process is connected to, and return when the application serves.

    `report` gets a line for each deployment that is ready. Raises: StartupError.
    """
    try:
        with _reporting(report):
            serve.run(build_with(config, engines), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise StartupError(_reason(error)) from error


def wind_down() -> int:
    """Stop admission at every orchestrator; returns the number of completions in progress. May be called again.

    Raises: Unavailable when not all of them answer.
    """
    return sum(_ask_orchestrators("wind_down"))


def cut_off() -> None:
    """End the completions in progress at every orchestrator, with an error for their callers.

    Raises: Unavailable when not all of them answer.
    """
    _ask_orchestrators("cut_off")


def _ask_orchestrators(method: str) -> list[Any]:
    answer: Future[list[Any]] = Future()
    # In a thread, because Serve may wait for its controller forever.
    Thread(target=_ask_each, args=(method, answer), daemon=True).start()
    try:
        return answer.result(WIND_DOWN_TIMEOUT_S)
    except (TimeoutError, RayError, RayServeException) as error:
        raise Unavailable(f"not all orchestrators answer: {first_line(error)}") from error


def _ask_each(method: str, answer: Future[list[Any]]) -> None:
    try:
        handle = serve.get_app_handle(APPLICATION)
        if not handle.is_initialized:  # Serve returns the same handle every time
            handle._init(_run_router_in_separate_loop=True)  # this thread has no event loop, unlike replicas
        answer.set_result(handle.broadcast(method).results(timeout_s=WIND_DOWN_TIMEOUT_S))
    except Exception as error:  # noqa: BLE001  passed on to the caller
        answer.set_exception(error)


@contextmanager
def _reporting(report: Callable[[str], None]) -> Iterator[None]:
    """Report each deployment when it is healthy; `serve.run` itself is silent until the end."""
    is_over = Event()
    watch = Thread(target=_report_health, args=(report, is_over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        watch.join()


def _report_health(report: Callable[[str], None], is_over: Event) -> None:
    reported: set[str] = set()
    while not is_over.wait(STATUS_PERIOD_S):
        application = serve.status().applications.get(APPLICATION)
        for name, deployment in application.deployments.items() if application else ():
            if deployment.status == "HEALTHY" and name not in reported:
                reported.add(name)
                report(f"{name} is loaded and warm" if name.startswith(("target", "draft")) else f"{name} is ready")


def _reason(error: RuntimeError) -> str:
    """Why a deployment failed, in one line: our last error in a replica's traceback, else a library's."""
    application = serve.status().applications.get(APPLICATION)
    messages = {name: each.message for name, each in application.deployments.items()} if application else {}
    for message in messages.values():
        if ours := [line for line in message.splitlines() if line.startswith("core.errors.")]:
            return str(ours[-1].partition(": ")[2])
    for name, message in messages.items():
        if raised := re.findall(r"^[A-Za-z_][\w.]*: .*$", message.partition(TRACE)[2], re.MULTILINE):
            return f"{name} does not start: {raised[-1]}"
    return str(error)
