"""Sequences with LoRA adapters: as the merged model alone gives them, whatever else is in their batches."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from core.config import EngineConfig
from core.errors import StartupError
from core.records import Adapter, Refused, Sampling
from tests import checkpoints
from tests.adapters import merge, write_adapter
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, chain, wrong
from tests.workers.engine.test_target import random_tree
from workers.engine.target import TargetEngine

SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)]
PROMPT = [Random(1).randrange(250) for _ in range(30)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write("qwen3", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    """Three adapters: of all linear layers, of two kinds only, and scaled for its rank with the output layer."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(root / "a", checkpoint, 1),
        write_adapter(root / "b", checkpoint, 2, ("q_proj", "down_proj"), rank=3),
        write_adapter(root / "c", checkpoint, 3, ("v_proj", "lm_head"), use_rslora=True),
    ]


@pytest.fixture(scope="module")
def merged(checkpoint, adapters, tmp_path_factory):
    return [merge(tmp_path_factory.mktemp("merged") / each.name, checkpoint, each) for each in adapters]


def load(path, **settings):
    config = EngineConfig(**{"model": str(path), "kv_cache_tokens": 2048, "block_tokens": 4} | settings)
    return TargetEngine.load(config, EPOCH, lambda _: None)


def add(engine, path, name=""):
    return engine.add_adapter(engine.read_adapter(Adapter(name or path.name, str(path))))


def driver(engine, adapter, sampling=SAMPLINGS[0], session="s", prompt=PROMPT):
    found = Driver(engine, prompt, sampling, session=session, num_logprobs=5)
    found.spec = replace(found.spec, adapter=adapter)
    return found


def alone(path, num_tokens, sampling=SAMPLINGS[0], prompt=PROMPT):
    return driver(load(path), None, sampling, prompt=prompt).run(num_tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("index", range(3))
def test_an_adapter_gives_the_tokens_of_the_merged_model(checkpoint, adapters, merged, index, sampling):
    engine = load(checkpoint)
    engine.warm_up(lambda _: None)
    got = driver(engine, add(engine, adapters[index]), sampling).run(20)
    assert got == alone(merged[index], 20, sampling)
    assert got != alone(checkpoint, 20, sampling), "an adapter that changes nothing shows nothing"


FAMILIES = {
    "llama": {},
    "gemma2": {},
    "phi3": {"targets": ("qkv_proj", "o_proj", "gate_up_proj")},
    "gpt_neox": {"targets": ("query_key_value", "dense_h_to_4h")},
    "gpt2": {"targets": ("c_attn", "c_proj"), "fan_in_fan_out": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_have_adapters_too(family, tmp_path):
    base = checkpoints.write(family, tmp_path / "base")
    path = write_adapter(tmp_path / "a", base, **FAMILIES[family])
    engine = load(base)
    got = driver(engine, add(engine, path)).run(8)
    assert got == alone(merge(tmp_path / "merged", base, path), 8)
    assert got != alone(base, 8)


@pytest.mark.parametrize("index", range(3))
def test_its_logits_are_close_to_those_of_transformers_with_merged_weights(checkpoint, adapters, merged, index):
    from transformers import AutoModelForCausalLM

    engine = load(checkpoint)
    verdict = driver(engine, add(engine, adapters[index])).verify()
    model = AutoModelForCausalLM.from_pretrained(merged[index], dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0, -1, : checkpoints.VOCAB_SIZE].log_softmax(-1)
    for token_id, logprob in verdict.logprobs[0].top:
        assert logprob == pytest.approx(logprobs[token_id].item(), abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}], ids=["plain", "deterministic"])
def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone(checkpoint, adapters, settings):
    engine = load(checkpoint, **settings)
    engine.warm_up(lambda _: None)
    chosen = [None, *(add(engine, path) for path in adapters), None]
    prompts = [PROMPT[: 9 + 4 * place] for place in range(len(chosen))]
    want = [driver(engine, each, session=f"alone {i}", prompt=prompts[i]) for i, each in enumerate(chosen)]
    want = [[each.verify() for _ in range(12)] for each in want]
    together = [driver(engine, each, session=f"{i}", prompt=prompts[i]) for i, each in enumerate(chosen)]
    for turn in range(12):
        verdicts = answer_all(engine, [each.verify_request() for each in together])
        for verdict, each, alone_verdicts in zip(verdicts, together, want, strict=True):
            assert verdict.next_token == alone_verdicts[turn].next_token
            if settings:
                assert verdict.logprobs == alone_verdicts[turn].logprobs, "bit for bit"
            each.log.extend([verdict.next_token])
            each.held = verdict.held


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_guesses_change_nothing(checkpoint, adapters, sampling):
    engine, random = load(checkpoint), Random(2)
    adapter = add(engine, adapters[0])
    expected = driver(engine, adapter, sampling, "plain").run(30)
    drafted, num_accepted = driver(engine, adapter, sampling, "drafted"), 0
    while len(drafted.log) < len(PROMPT) + 24:
        done = len(drafted.log) - len(PROMPT)
        block = random_tree(random, expected[done : done + 4])
        num_accepted += len(drafted.verify(block).path)
    got = list(drafted.log.tokens)[len(PROMPT) :]
    assert got == expected[: len(got)]
    assert num_accepted > 8


def test_the_same_text_under_another_adapter_shares_no_kv(checkpoint, adapters, merged):
    engine = load(checkpoint)
    a, b = (add(engine, path) for path in adapters[:2])
    runs = {}
    for turn, each in enumerate([None, a, b, None, a, b]):
        one = driver(engine, each, session=f"{turn}")
        verdict = one.verify()
        assert verdict.num_cached == (28 if turn > 2 else 0), "each has a prefix of its own, from its second session on"
        runs.setdefault(each, []).append([verdict.next_token, *one.run(7)])
    assert runs[a] == [alone(merged[0], 8)] * 2
    assert runs[b] == [alone(merged[1], 8)] * 2
    assert runs[None] == [alone(checkpoint, 8)] * 2


def test_other_weights_under_the_same_name_share_no_kv(checkpoint, adapters, merged):
    engine = load(checkpoint)
    first = add(engine, adapters[0], "same")
    driver(engine, first, session="1").verify()
    engine.release(["1"])
    assert engine.drop_adapter(first.digest)
    second = add(engine, adapters[1], "same")
    one = driver(engine, second, session="2")
    verdict = one.verify()
    assert verdict.num_cached == 0
    assert [verdict.next_token, *one.run(7)] == alone(merged[1], 8)


def test_a_session_that_changes_its_adapter_keeps_no_kv(checkpoint, adapters, merged):
    engine = load(checkpoint, share_prefixes=False)
    a = add(engine, adapters[0])
    driver(engine, None).verify()
    again = driver(engine, a)
    again.round = 1
    assert again.run(6) == alone(merged[0], 6)
    engine.check_integrity()


def test_an_adapter_in_use_is_dropped_when_its_last_session_ends(checkpoint, adapters, merged):
    engine = load(checkpoint)
    a = add(engine, adapters[0])
    one = driver(engine, a)
    got = one.run(3)
    assert not engine.drop_adapter(a.digest)
    assert [*got, *one.run(3)] == alone(merged[0], 6)
    engine.release(["s"])
    assert engine.drop_adapter(a.digest)
    assert engine.drop_adapter(a.digest), "it is gone already"
    refused = answer(engine, driver(engine, a, session="late").verify_request())
    assert isinstance(refused, Refused)
    assert (refused.field, refused.reason) == ("model", "adapter 'a' has been unloaded")
    assert driver(engine, None, session="other").run(3) == alone(checkpoint, 3), "others are served on"


def test_settings_name_adapters_to_load_at_start(checkpoint, adapters):
    engine = load(checkpoint, adapters={"one": str(adapters[0])}, max_adapters=1)
    engine.warm_up(lambda _: None)
    [adapter] = engine.info.adapters
    assert adapter.name == "one"
    assert adapter.digest.startswith("sha256:")
    assert add(engine, adapters[0], "another name") == replace(adapter, name="another name"), "the same weights"
    with pytest.raises(StartupError, match="adapter 'b': 1 adapters are loaded, which is max_adapters"):
        add(engine, adapters[1])


def test_a_lost_round_is_computed_again_with_the_adapter(checkpoint, adapters, merged):
    """A preempted session sends its whole text again."""
    engine = load(checkpoint)
    one = driver(engine, add(engine, adapters[0]))
    got = one.run(4)
    engine._store.drop("s")
    one.held = 0
    assert [*got, *one.run(4)] == alone(merged[0], 8)


def test_a_pass_without_adapters_is_run_as_if_there_were_none(checkpoint, adapters):
    engine = load(checkpoint)
    engine.warm_up(lambda _: None)
    adapter = add(engine, adapters[0])
    one, other = driver(engine, None, session="1"), driver(engine, adapter, session="2")
    engine._runtime.backends.num_base_steps = 0
    one.run(3)
    assert engine._runtime.backends.num_base_steps == 0, "the recorded operators run it"
    other.run(3)
    assert engine._runtime.backends.num_base_steps == 3
    model = engine._runtime.context.model
    assert not any(module._forward_hooks for module in model.modules())


def test_rejected_guesses_leave_no_trace(checkpoint, adapters, merged):
    engine = load(checkpoint)
    one = driver(engine, add(engine, adapters[0]))
    got = [one.verify(chain(wrong(token), 7)).next_token for token in [1, 2, 3, 4]]
    assert got == alone(merged[0], 4)
