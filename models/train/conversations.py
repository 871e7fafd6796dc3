"""Lets a chat model write conversations with itself, to train a head on: `outrider train-head` reads the file.

The model continues the beginning of its chat template, which makes a user's message (Magpie, arXiv 2406.08464), and
answers it, greedily or at `TEMPERATURE`. Some prompts ask for functions of Python's standard library instead.
"""

import argparse
import ast
import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.text import Tokenizer
from outrider import LLM

TEMPERATURE = 0.8
BATCH = 32
MAX_USER_TOKENS, MAX_ANSWER_TOKENS = 120, 320
MARK = "\u2402"
"""Stands for the user's message, which shows where the template puts it."""
ASKED = (
    "Write a Python function `{name}`: {doc}",
    "Implement {name} in Python.\n\n{doc}",
    "What does {name} do?\n{doc}",
)
MODULES = ("argparse", "bisect", "calendar", "difflib", "fnmatch", "inspect", "random", "shutil", "statistics")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m models.train.conversations", description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, default=2000, help="number of conversations")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = {"target.engine.dtype": options.dtype, "limits.max_sessions": BATCH}
    chance = random.Random(options.seed)
    with LLM(options.target, settings=settings) as llm, options.out.open("a", encoding="utf-8") as out:
        prefix = Tokenizer.from_directory(options.target).chat_text([{"role": "user", "content": MARK}]).split(MARK)[0]
        written = 0
        while written < options.num:
            for conversation in conversations(llm, prefix, chance):
                out.write(json.dumps(conversation) + "\n")
                written += 1
            out.flush()
    return 0


def conversations(llm: LLM, prefix: str, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Half a batch of each kind of prompt, answered."""
    users = llm.generate([prefix] * (BATCH // 2), temperature=1.0, max_tokens=MAX_USER_TOKENS)
    asked = [("chat", each.text.strip()) for each in users if each.finish_reason == "stop" and each.text.strip()]
    asked += [("code", prompt) for prompt in chance.sample(code_prompts(chance), BATCH // 2)]
    temperature = chance.choice([0.0, TEMPERATURE])
    chats = [[{"role": "user", "content": prompt}] for _, prompt in asked]
    answers = llm.chat(chats, temperature=temperature, max_tokens=MAX_ANSWER_TOKENS)
    for (kind, _), chat, answer in zip(asked, chats, answers, strict=True):
        messages = [*chat, {"role": "assistant", "content": answer.text}]
        yield {"messages": messages, "kind": kind, "temperature": temperature}


def code_prompts(chance: random.Random) -> list[str]:
    """Questions about functions that have a docstring."""
    found = []
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(__import__(module)))):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                found.append(chance.choice(ASKED).format(name=node.name, doc=doc.split("\n\n")[0]))
    return found


if __name__ == "__main__":
    sys.exit(main())
