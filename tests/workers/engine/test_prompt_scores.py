"""A prompt's own log probabilities are the model's, however its prefill is cut, shared, preempted or begun again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.config import EngineConfig
from core.records import Refused, Sampling
from core.speculation import EMPTY_BLOCK
from tests.checkpoints import VOCAB_SIZE
from tests.workers.engine.driving import EPOCH, Driver, answer, answer_all, poisoned
from workers.engine import jobs, scheduler
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31, 8, 8, 61, 3, 120, 45, 9, 77, 2, 18, 6, 101, 11, 40, 23]
SAMPLED = Sampling(temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """The scores of transformers for each token but the first."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        log_p = model(torch.tensor([PROMPT])).logits[0, :, :VOCAB_SIZE].log_softmax(-1)  # the rest is padding
    return [(float(row[token]), row.topk(2).indices.tolist()) for row, token in zip(log_p, PROMPT[1:], strict=False)]


def load(checkpoint, **settings):
    given = {"block_tokens": 4, "kv_cache_tokens": 512, "share_prefixes": True, **settings}
    return TargetEngine.load(EngineConfig(checkpoint, **given), EPOCH, lambda _: None)


def scoring(engine, prompt=PROMPT, session="scored", num_top=2, **fields):
    driver = Driver(engine, prompt, SAMPLED, session=session)
    driver.spec = replace(driver.spec, num_prompt_logprobs=num_top, **fields)
    return driver


def check(verdict, expected):
    assert [each.logprob for each in verdict.prompt_logprobs] == pytest.approx([p for p, _ in expected], abs=1e-4)
    assert [[token for token, _ in each.top] for each in verdict.prompt_logprobs] == [top for _, top in expected]


def test_each_token_but_the_first_is_scored_and_the_output_is_as_without(checkpoint, expected):
    engine = load(checkpoint)
    plain = Driver(engine, PROMPT, SAMPLED, session="plain").run(6)
    driver = scoring(engine)
    verdict = driver.verify()
    check(verdict, expected)
    assert [verdict.next_token, *driver.run(5)] == plain
    later = driver.verify()
    assert not later.prompt_logprobs, "once is enough"


def test_a_prefix_that_others_have_left_is_scored_all_the_same(checkpoint, expected):
    """An adopted prefix has KV and no logits: an engine that adopts it would report the rest alone."""
    engine = load(checkpoint)
    Driver(engine, PROMPT, SAMPLED, session="first").run(2)
    other = Driver(engine, PROMPT, SAMPLED, session="second")
    other.verify()
    num_adopted = engine.stats().num_adopted_tokens
    assert num_adopted >= 16, "others do adopt it"
    check(scoring(engine).verify(), expected)
    assert engine.stats().num_adopted_tokens == num_adopted


@pytest.fixture
def cut(monkeypatch):
    """Has prompts that are scored take so many rows of a step."""

    def take(num_rows):
        monkeypatch.setattr(jobs, "SCORED_ROWS", num_rows)
        for name in ("MIN_CHUNK_TOKENS", "DECODE_TOKENS"):
            monkeypatch.setattr(scheduler, name, 1)

    return take


def steps(engine):
    """All replies to what the engine has been asked."""
    replies = []
    while engine.has_work:
        replies += engine.step()
    return replies


@pytest.mark.parametrize("num_rows", [1, 3, 20, 21])
def test_however_the_prompt_is_cut_into_steps_its_scores_are_the_same(checkpoint, expected, num_rows, cut):
    cut(num_rows)
    engine = load(checkpoint)
    check(scoring(engine).verify(), expected)
    assert engine.stats().num_steps >= len(PROMPT) / num_rows


def test_company_changes_neither_scores_nor_verdicts(checkpoint, expected, cut):
    cut(8)
    engine = load(checkpoint)
    plain = {name: Driver(engine, PROMPT[k:], SAMPLED, session=name).run(4) for k, name in enumerate("abc")}
    drivers = {name: Driver(engine, PROMPT[k:], SAMPLED, session=f"again {name}") for k, name in enumerate("abc")}
    drivers["scored"] = scoring(engine)
    replies = answer_all(engine, [driver.verify_request() for driver in drivers.values()])
    verdicts = dict(zip(drivers, replies, strict=True))
    check(verdicts.pop("scored"), expected)
    assert {name: verdict.next_token for name, verdict in verdicts.items()} == {n: ids[0] for n, ids in plain.items()}
    assert not any(verdict.prompt_logprobs for verdict in verdicts.values())


def test_output_that_is_resumed_is_not_scored(checkpoint, expected):
    engine = load(checkpoint)
    check(scoring(engine, prompt_len=9).verify(), expected[:8])


def test_a_prefill_that_is_preempted_is_scored_from_its_first_token(checkpoint, expected, cut):
    cut(4)
    engine = load(checkpoint)
    engine.add(scoring(engine).verify_request())
    for _ in range(2):
        assert engine.step() == []
    (job,) = engine._jobs
    engine._room.preempt(job.held, {"scored": job})
    (verdict,) = steps(engine)
    check(verdict, expected)
    engine.check_integrity()


def test_a_message_that_overtakes_another_has_the_whole_prompt_scored_again(checkpoint, expected, cut):
    """Its held tokens agree, and would not be computed again for anybody else."""
    cut(4)
    engine = load(checkpoint)
    driver = scoring(engine)
    engine.add(driver.verify_request())
    engine.step()
    assert len(engine._store.find("scored").log) == 4
    check(answer(engine, driver.verify_request()), expected)
    engine.check_integrity()


def test_where_a_prompt_gives_no_distribution_it_is_refused(checkpoint):
    engine = load(checkpoint)
    with poisoned(engine, 3):
        reply = answer(engine, scoring(engine).verify_request(EMPTY_BLOCK))
    assert isinstance(reply, Refused)
    assert reply.is_final
