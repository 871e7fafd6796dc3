"""OpenVINO GenAI as a peer: its continuous batching behind HTTP, with or without its prompt lookup.

`PYTHON -m bench.peers.openvino_server DIR THREADS GUESSES PORT`, in an environment that has it; DIR was made by
`optimum-cli export openvino`. Imports nothing of the project but the HTTP server beside it.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any

import openvino_genai as genai  # type: ignore[import-not-found]  # installed in another environment

from bench.peers.chat_server import Prompt, serve

CACHE_GB = 2
MAX_NGRAM = 3


class Batches:
    """One thread steps the pipeline as long as there are requests; each request's thread waits for its own."""

    def __init__(self, pipeline: Any, num_guesses: int) -> None:
        self._pipeline, self._num_guesses = pipeline, num_guesses
        self._tokenizer = pipeline.get_tokenizer()
        self._ids = itertools.count()
        self._has_work = threading.Condition()
        threading.Thread(target=self._step, daemon=True).start()

    def complete(self, prompt: Prompt, max_tokens: int) -> tuple[str, int]:
        config = genai.GenerationConfig(max_new_tokens=max_tokens, do_sample=False)
        if self._num_guesses:
            config.num_assistant_tokens, config.max_ngram_size = self._num_guesses, MAX_NGRAM
        if not isinstance(prompt, str):
            prompt = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        with self._has_work:
            handle = self._pipeline.add_request(next(self._ids), prompt, config)
            self._has_work.notify()
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            time.sleep(0.001)
        token_ids = handle.read_all()[0].generated_ids
        return self._tokenizer.decode(token_ids), len(token_ids)

    def _step(self) -> None:
        while True:
            with self._has_work:
                self._has_work.wait_for(self._pipeline.has_non_finished_requests)
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()


def main(model: str, num_threads: int, num_guesses: int, port: int) -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    settings = {"INFERENCE_NUM_THREADS": num_threads, "INFERENCE_PRECISION_HINT": "bf16"}
    lookup = {"prompt_lookup": True} if num_guesses else {}
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {**settings, **lookup})
    serve(port, Batches(pipeline, num_guesses).complete)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
