"""GuideLLM, a load tool that people use, drives the running demo pair as any server, by both of OpenAI's paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local import DEMO
from served import Guarded

GUIDELLM = Path(sys.prefix) / "guidellm" / "bin" / "guidellm"
"""In an environment of its own; `make load-tool` makes it."""
NUM_REQUESTS = 8
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 16
TIMEOUT_S = 240

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not GUIDELLM.exists(), reason=f"{GUIDELLM} is not there; make load-tool installs it"),
]


@pytest.mark.parametrize(
    ("path", "profile"),
    [("/v1/completions", "kind=concurrent,streams=2"), ("/v1/chat/completions", "kind=constant,rate=4")],
)
def test_guidellm_drives_the_service_and_counts_its_tokens(guarded, tmp_path, path, profile):
    """In a closed and in an open loop, with a key."""
    (benchmark,) = driven(guarded, path, profile, tmp_path)["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["incomplete"], totals["errored"]) == (NUM_REQUESTS, 0, 0)
    for request in benchmark["requests"]["successful"]:
        assert request["output"]
        assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS, "by the usage at the end of the stream"
        assert request["input_metrics"]["text_tokens"] >= PROMPT_TOKENS, "a template may add some"
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["count"] == NUM_REQUESTS


def driven(server: Guarded, path: str, profile: str, directory: Path) -> dict[str, Any]:
    """Its report."""
    file = directory / "report.json"
    backend = f"kind=openai_http,target={server.url},model=outrider-demo,request_format={path},api_key={server.token}"
    asked = {
        "--backend": backend,
        "--profile": profile,
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={DEMO / 'target'}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output": f"kind=json,path={file}",
    }
    command = [str(GUIDELLM), "run", "--disable-console", *(word for pair in asked.items() for word in pair)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment, cwd=directory
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(file.read_text())
    return report
