"""transformers as a peer: `generate` behind HTTP, one request at a time, with or without its prompt lookup.

`python -m bench.peers.transformers_server DIR THREADS GUESSES PORT`. Knows `generate`; must not know our engines.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.peers.chat_server import Prompt, serve


class Generation:
    """A model and its tokenizer."""

    def __init__(self, model: Path, num_guesses: int) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._options = {"prompt_lookup_num_tokens": num_guesses} if num_guesses else {}
        self._is_free = threading.Lock()

    def complete(self, prompt: Prompt, max_tokens: int) -> tuple[str, int]:
        if not isinstance(prompt, str):
            prompt = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        tokens = self._tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with self._is_free, torch.inference_mode():
            output = self._model.generate(**tokens, do_sample=False, max_new_tokens=max_tokens, **self._options)
        token_ids = output[0, tokens["input_ids"].shape[1] :]
        return self._tokenizer.decode(token_ids, skip_special_tokens=True), len(token_ids)


def main(model: Path, num_threads: int, num_guesses: int, port: int) -> None:
    torch.set_num_threads(num_threads)
    serve(port, Generation(model, num_guesses).complete)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
