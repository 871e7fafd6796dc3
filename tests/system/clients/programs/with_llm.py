"""The command `llm` with a model of its `extra-openai-models.yaml`, and its Python API."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import CITIES, KEY, MODEL, SCHEMA, URL, run

FOLDER = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = FOLDER.name
Path(FOLDER.name, "extra-openai-models.yaml").write_text(
    f"""
- model_id: here
  model_name: {MODEL}
  api_base: {URL}/v1
  api_key_name: here
  supports_schema: true
  supports_tools: true
- model_id: completing
  model_name: {MODEL}
  api_base: {URL}/v1
  api_key_name: here
  completion: true
""",
    encoding="utf-8",
)

Path(FOLDER.name, "keys.json").write_text(json.dumps({"here": KEY}), encoding="utf-8")

from llm import get_model


def command(*words):
    done = subprocess.run(
        [sys.executable, "-m", "llm", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_a_prompt_at_the_command_line():
    assert command("-m", "here", "-o", "max_tokens", "12", "--no-stream", "import os")
    assert command("-m", "here", "-o", "max_tokens", "12", "-s", "be brief", "import os")


def check_a_schema_at_the_command_line():
    said = command("-m", "here", "-o", "max_tokens", "80", "--schema", json.dumps(SCHEMA), "where?")
    assert json.loads(said)["city"] in CITIES


def check_a_completion():
    assert get_model("completing").prompt("import os", max_tokens=8).text()


def check_a_schema():
    for stream in (False, True):
        reply = get_model("here").prompt("where?", schema=SCHEMA, max_tokens=80, stream=stream)
        assert any(city in reply.text() for city in CITIES)
        assert reply.usage().output > 0


def check_a_conversation_with_tools():
    def place() -> str:
        """Where?"""
        return "Oslo"

    chat = get_model("here").conversation(tools=[place])
    assert chat.prompt("where?", max_tokens=12).text() is not None
    assert chat.prompt("and where?", max_tokens=12).text() is not None


run(globals())
