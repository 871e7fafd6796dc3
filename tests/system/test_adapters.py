"""The demo pair with adapters on the target alone: the tokens are those of merged weights, drafted or not."""

from __future__ import annotations

import pytest
from local import DEMO

from core.errors import InvalidRequest
from outrider import LLM, SamplingParams
from tests.adapters import merge, write_adapter

PROMPTS = ["import os", "class Point:\n    def __init__(self, x"]
ALONE = {"target.engine.deterministic": True, "target.engine.dtype": "float32", "target.engine.num_threads": 1}
SETTINGS = {
    "target.engine.dtype": "float32",
    "speculation.policy": "static",
    "speculation.breaker_rounds": 1000,
    "speculation.max_draft_tokens": 4,
    "speculation.draft_timeout_s": 30.0,
    "target.engine.deterministic": True,
}
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.8, "seed": 5}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, DEMO / "target", seed, lora_alpha=0.4) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def llm(paths):
    adapters = {"target.engine.adapters": {name: str(path) for name, path in paths.items()}}
    with LLM(DEMO / "target", draft=DEMO / "draft", settings={**SETTINGS, **adapters}) as llm:
        yield llm


def params(adapter, **fields):
    return SamplingParams(max_tokens=24, ignore_eos=True, adapter=adapter, **fields)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafting_changes_no_token_of_any_adapter(llm, sampling):
    """Six sequences share their steps: two prompts, each under the model itself and under two adapters."""
    jobs = [(prompt, adapter) for prompt in PROMPTS for adapter in (None, "a", "b")]
    prompts = [prompt for prompt, _ in jobs]
    drafted = llm.generate(prompts, [params(adapter, **sampling) for _, adapter in jobs])
    plain = llm.generate(prompts, [params(adapter, **sampling, max_draft_tokens=0) for _, adapter in jobs])
    alone = [llm.generate(prompt, params(adapter, **sampling))[0] for prompt, adapter in jobs[:3]]
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert [each.token_ids for each in drafted[:3]] == [each.token_ids for each in alone]
    assert len({each.token_ids for each in drafted}) > len(PROMPTS)
    for index, (_, adapter) in enumerate(jobs):
        stats = drafted[index].outputs[0].stats
        assert stats.num_drafted_tokens > 0, adapter
    assert sum(each.outputs[0].stats.num_accepted_tokens for each in drafted) > 0


def test_they_are_the_tokens_of_the_merged_model(llm, paths, tmp_path):
    merged = merge(tmp_path / "merged", DEMO / "target", paths["a"])
    with LLM(merged, settings=ALONE) as alone:
        want = alone.generate(PROMPTS, max_tokens=24, ignore_eos=True, **GREEDY)
    got = llm.generate(PROMPTS, params("a", **GREEDY))
    assert [each.token_ids for each in got] == [each.token_ids for each in want]


def test_a_receipt_has_the_digest_of_the_adapter(llm):
    (output,) = llm.generate(PROMPTS[0], params("a", receipt=True))
    assert output.outputs[0].receipt["model"] == "a"
    assert output.outputs[0].receipt["adapter_digest"].startswith("sha256:")


def test_an_unknown_adapter_is_refused_by_the_argument(llm):
    with pytest.raises(InvalidRequest, match=r"adapter: must be one of a, b, got 'c' \(prompts\[0\]\)"):
        llm.generate(PROMPTS[0], params("c"))
