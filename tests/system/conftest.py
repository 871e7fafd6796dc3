"""One service for the tests of what a caller with a token meets: HTTP by all its APIs, receipts, spans."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from collector import Collector
from local import DEMO
from served import Guarded, deployed

from deploy.launch.cluster import Endpoints
from deploy.settings import demo_config
from outrider_client import Client

if TYPE_CHECKING:
    import openai

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}# {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}"
)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def guarded(cluster: Endpoints, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    """With a chat template, which the demo's models have none of, a token, and a collector of spans."""
    folder = tmp_path_factory.mktemp("guarded")
    shutil.copytree(DEMO / "target", folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokens").write_text(Guarded.token)
    settings = [
        f"target.engine.model={folder / 'target'}",
        f"orchestrator.tokens_file={folder / 'tokens'}",
        f"orchestrator.tracing.endpoint={collector.endpoint}",
        "orchestrator.tracing.sample=0",
        f"limits.max_sessions={Guarded.max_sessions}",
        "limits.max_queued=0",
        "limits.retry_after_s=0.5",
    ]
    return Guarded(deployed(demo_config(settings), cluster).address, cluster.http_port)


@pytest.fixture
def client(guarded: Guarded) -> Iterator[openai.OpenAI]:
    import openai  # which takes seconds, and most tests here do without

    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=guarded.token, max_retries=0) as client:
        yield client


@pytest.fixture
def grpc_client(guarded: Guarded) -> Iterator[Client]:
    with Client(guarded.address, token=guarded.token) as client:
        yield client
