"""A quantized target gives the tokens of its dequantized weights, with any draft; a quantized draft changes none."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM
from tests.quantized import quantize
from tests.reference import generate

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPTS = ["import os", "def read_lines(path):", "class Point:\n    def __init__(self, x", "x = ["]
STATIC = {
    "speculation.policy": "static",
    "speculation.max_draft_tokens": 4,
    "speculation.draft_timeout_s": 30.0,
    "speculation.breaker_rounds": 1000,
}
SEEDED = {"temperature": 0.9, "seed": 7}


@pytest.mark.parametrize(("target", "draft"), [("W4A16", None), (None, "AWQ"), ("GPTQ", "DeepSeek")])
def test_quantized_pairs(target: str | None, draft: str | None, tmp_path: Path) -> None:
    paths, floats = {}, {}
    for name, kind in (("target", target), ("draft", draft)):
        whole = (DEMO / name, DEMO / name)
        paths[name], floats[name] = quantize(kind, DEMO / name, tmp_path / name) if kind else whole
    with LLM(paths["target"], draft=paths["draft"], settings={**STATIC, "limits.max_sessions": 4}) as llm:
        outputs = llm.generate(PROMPTS, max_tokens=16, temperature=0, ignore_eos=True)
        for output in outputs:
            assert output.token_ids == tuple(generate(floats["target"], output.prompt_token_ids, 16))
        assert sum(output.outputs[0].stats.num_accepted_tokens for output in outputs) > 0
        drafted, plain = (
            [each.token_ids for each in llm.generate(PROMPTS, max_tokens=16, ignore_eos=True, **SEEDED, **more)]
            for more in ({}, {"max_draft_tokens": 0})
        )
        assert drafted == plain
