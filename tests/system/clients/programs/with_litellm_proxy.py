"""The proxy of litellm before the server: by OpenAI's APIs, and by Anthropic's, which it translates to OpenAI's."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
from checks import CITIES, KEY, MODEL, SCHEMA, URL, run

START_S = 120
OWN_KEY = f"sk-{secrets.token_hex(32)}"
"""That its callers send; it takes no short one."""
MODELS = {
    "by-openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY},
    "by-vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY},
    "by-anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY},
}
MESSAGES = [{"role": "user", "content": "where?"}]
CHAT_TOOL = {"type": "function", "function": {"name": "place", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "place"}}


@contextlib.contextmanager
def proxy():
    """Where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("w+b") as log:
        config = Path(folder, "config.json")
        models = [{"model_name": name, "litellm_params": params} for name, params in MODELS.items()]
        config.write_text(json.dumps({"model_list": models}), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config), "--port", str(port)]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": OWN_KEY}
        running = subprocess.Popen(
            [*command, "--host", "127.0.0.1"], stdout=log, stderr=log, env=environment, cwd=folder
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, running, log)
            yield url
        finally:
            running.terminate()
            running.wait(20)


def wait_for(url, running, log):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and running.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/liveliness").status_code == 200:
                return
        time.sleep(0.5)
    log.seek(0)
    raise RuntimeError(log.read().decode())


def check_the_proxy():
    with proxy() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=OWN_KEY, max_retries=0)
        for name in MODELS:
            calls_by_chats(client, name)
            blocks_by_messages(url, name)
            print("held", name)
        response = client.responses.create(model="by-openai", input="where?", max_output_tokens=12)
        assert response.usage.output_tokens > 0


def calls_by_chats(client, name):
    given = {"model": name, "messages": MESSAGES, "tools": [CHAT_TOOL], "tool_choice": NAMED, "max_tokens": 80}
    (call,) = client.chat.completions.create(**given).choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES
    chunks = list(client.chat.completions.create(**given, stream=True))
    deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert json.loads("".join(call.function.arguments or "" for call in deltas))["city"] in CITIES


def blocks_by_messages(url, name):
    given = {
        "model": name,
        "messages": MESSAGES,
        "max_tokens": 80,
        "tools": [{"name": "place", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "place"},
    }
    headers = {"x-api-key": OWN_KEY, "anthropic-version": "2023-06-01"}
    whole = httpx.post(f"{url}/v1/messages", json=given, headers=headers, timeout=60)
    assert whole.status_code == 200, whole.text
    (block,) = [each for each in whole.json()["content"] if each["type"] == "tool_use"]
    assert block["input"]["city"] in CITIES
    streamed = httpx.post(f"{url}/v1/messages", json={**given, "stream": True}, headers=headers, timeout=60).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    assert json.loads(arguments)["city"] in CITIES, streamed
    if name != "by-anthropic":
        return  # a budget becomes an effort on the way, which is refused where the chat template has none
    thinking = {**given, "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked = httpx.post(f"{url}/v1/messages", json={**thinking, "max_tokens": 1100}, headers=headers, timeout=60)
    assert asked.status_code == 200, asked.text


run(globals())
