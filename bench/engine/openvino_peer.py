"""OpenVINO GenAI as a peer: plain decoding in an environment of its own, one completion per request.

`bench runtime --openvino PYTHON DIR` runs it as `PYTHON bench/engine/openvino_peer.py DIR PRECISION THREADS PROMPT
TOKENS`, where DIR was made from the same checkpoint by `optimum-cli export openvino --task text-generation-with-past`.
It answers each line on stdin with a line: seconds per token after the first. Imports nothing of the project.
"""

import random
import sys
import time

import numpy as np
import openvino  # type: ignore[import-not-found]  # installed in another environment
import openvino_genai  # type: ignore[import-not-found]


def main(model: str, precision: str, num_threads: int, num_prompt: int, num_tokens: int) -> None:
    """Load the model, print "ready", and answer until stdin ends."""
    pipeline = openvino_genai.LLMPipeline(
        model, "CPU", INFERENCE_NUM_THREADS=num_threads, INFERENCE_PRECISION_HINT=precision
    )

    def seconds(count: int) -> float:
        config = openvino_genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        ids = np.array([[random.randrange(1000) for _ in range(num_prompt)]])
        began_s = time.perf_counter()
        pipeline.generate(openvino.Tensor(ids), config)
        return time.perf_counter() - began_s

    seconds(4)
    print("ready", flush=True)
    for _ in sys.stdin:
        first_s = seconds(1)
        print((seconds(1 + num_tokens) - first_s) / num_tokens, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
