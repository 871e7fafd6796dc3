"""Conversations that a model writes with itself are texts to train a head on."""

from __future__ import annotations

import json
import random

from deploy.cli.training.training_texts import read_texts
from models.train import conversations
from orchestrator.text import Tokenizer
from outrider import LLM
from tests import checkpoints

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_both_sides_are_written_and_read_again(tmp_path, monkeypatch):
    target = checkpoints.write("llama", tmp_path / "llama")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(conversations, "BATCH", 8)
    monkeypatch.setattr(conversations, "MAX_ANSWER_TOKENS", 6)
    prompts = conversations.code_prompts(random.Random(1))
    assert any("insort_right" in prompt for prompt in prompts)
    with LLM(
        target, settings={"target.engine.kv_cache_tokens": 4096, "target.engine.num_threads": 1}, progress=False
    ) as llm:
        found = list(conversations.conversations(llm, "user: ", random.Random(1)))
    assert {each["kind"] for each in found} >= {"code"}
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in found))
    tokenizer = Tokenizer.from_directory(target)
    texts = read_texts([file], tokenizer, tokenizer.vocab_size)
    assert len(texts) == len(found) >= 4
    assert {text.temperature for text in texts} <= {0.0, conversations.TEMPERATURE}
