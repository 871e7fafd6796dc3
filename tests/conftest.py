"""For all tests: one thread, no network, and no Ray unless the test is marked `ray`."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before torch, transformers or Ray are imported: each reads its settings once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # its fork handlers crash the nodes that tests start while streams run

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `tests.checkpoints` and the like can be imported


settings.register_profile("untimed", settings(), deadline=None)  # a busy machine is no fault
settings.register_profile("edit", settings(), deadline=None, max_examples=25)  # by `make test-fast` and `make test`
settings.load_profile("untimed")

THOROUGH = {Path(__file__).parent / folder for folder in ("bench", "k8s", "models", "simulation", "system")}
"""Folders of tests that run whole programs, models, manifests or days: none of them is for the run after an edit."""

BENCHMARKS = Path(__file__).parent / "bench"
"""Tests that guard benchmarks, and nothing that is served: continuous integration runs them."""

LONGEST = {"test_compiled_cpu.py", "test_chaos.py", "test_exactness.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules without tests to run: whole programs take seconds."""
    chosen = config.option.markexpr
    if collection_path in THOROUGH and "not thorough" in chosen:
        return True
    if collection_path == BENCHMARKS and "not slow" in chosen:
        return True
    is_module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_module and not may_be_chosen(collection_path.read_text(), chosen) else None


def may_be_chosen(module: str, chosen: str) -> bool:
    """Whether a module of this text may have a test for a run that leaves out a marker, or of those on Ray."""
    if any(f"not {marker}" in chosen and is_marked(module, marker) for marker in ("ray", "thorough")):
        return False
    return "and ray" not in chosen or "pytest.mark.ray" in module


def is_marked(module: str, marker: str) -> bool:
    """Whether all tests of a module are, and its text says so in one line."""
    return re.search(rf"^pytestmark = .*\bpytest\.mark\.{marker}\b", module, re.MULTILINE) is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported now becomes garbage: to look for some, now and during each test, takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) and item.get_closest_marker("ray") is None:
            raise pytest.UsageError(f"{item.nodeid} takes the cluster but is not marked `ray`")  # too early for _no_ray
        if BENCHMARKS in item.path.parents and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.ci)
        if item.get_closest_marker("ci") is not None:
            item.add_marker(pytest.mark.slow)
        if THOROUGH.intersection(item.path.parents) or has_a_further_seed(item):
            item.add_marker(pytest.mark.thorough)


def _turn(item: pytest.Item) -> tuple[bool, bool, bool, bool]:
    """The longest come first, so that no process waits for them in the end; a shared cluster comes last, since a
    process has one at a time, and on it what single modules deploy before what several share."""
    names = getattr(item, "fixturenames", ())
    return "cluster" in names, "running" in names, "guarded" in names, item.path.name not in LONGEST


def has_a_further_seed(item: pytest.Item) -> bool:
    """Whether the test is one that tries several seeds, and this is not the first of them."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("seed", 0) != 0


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    """Tests share few cores with each other; torch is imported by those that need it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that is not marked `ray` may not start one."""
    if request.node.get_closest_marker("ray") is not None:
        yield
        return

    def refuse(*_args: object, **_kwargs: object) -> None:
        pytest.fail("this test starts Ray but is not marked `ray`")

    was_imported = "ray" in sys.modules
    if was_imported:
        monkeypatch.setattr(sys.modules["ray"], "init", refuse)
    yield
    if not was_imported and "ray" in sys.modules and sys.modules["ray"].is_initialized():
        refuse()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray and Serve, for all tests that neither start nor stop nodes; with more logical CPUs than they take."""
    from deploy.launch.cluster import local_cluster  # Ray, which other tests do without
    from tests.system.served import EXPORT_PERIOD_S

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", str(round(EXPORT_PERIOD_S * 1000)))
        with local_cluster(num_cpus=16) as endpoints:
            yield endpoints


@pytest.fixture(scope="session")
def running(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo pair on that cluster, for all tests of what its clients meet.

    With a static policy: the adaptive one would rest on a busy machine, and nothing would be drafted. And with an index
    of some code, for the guesser "retrieval".
    """
    from deploy.cli.main import main
    from deploy.settings import DEMO_DIRECTORY, demo_config
    from tests.system.served import MAX_SESSIONS, deployed

    index = tmp_path_factory.mktemp("index") / "corpus.index"
    corpus = DEMO_DIRECTORY.parents[1] / "core"
    given = ["index", str(corpus), "--tokenizer", str(DEMO_DIRECTORY / "target"), "--out", str(index)]
    assert main([*given, "--glob", "**/*.py"]) == 0
    speculation = (
        "max_draft_tokens=8",
        "policy=static",
        "draft_timeout_s=30",
        "breaker_rounds=1000",
        "allow_relaxed=true",
        f"retrieval_index={index}",
    )
    settings = [
        *(f"speculation.{each}" for each in speculation),
        f"limits.max_sessions={MAX_SESSIONS}",
        "limits.max_queued=0",
    ]
    return deployed(demo_config(settings), cluster)
