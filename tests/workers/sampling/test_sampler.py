"""The torch twin gives what the numpy reference gives, row by row, whatever else is in the batch."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import noise
from core.exact import sampling
from core.noise import Purpose
from core.records import Sampling
from core.rules.chains import valid_prefix
from core.speculation.token_tree import TokenTree
from tests.workers.sampling.uploaded import drawn_guesses
from tests.workers.step.readbacks import at_once
from workers.noise import gumbel
from workers.sampling import sampler as twin
from workers.sampling.logits import Row

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
VOCAB_SIZE = 23
PROMPT = [3, 3, 5]
U64 = st.integers(0, 2**64 - 1)

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 3, VOCAB_SIZE, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-6, 5e-324]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.7, 1.0, 5e-324]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8, 0.1, 10.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, 2.0, -2.0, 5e-324]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 2.0, -2.0, -5e-324]),
    logit_bias=st.sampled_from([(), (), ((4, 50.0), (7, -100.0), (4, -20.0), (10**6, 1.0)), ((3, 100.0), (5, 5e-324))]),
    min_tokens=st.sampled_from([0, 0, 2]),
    suppressed_ids=st.sampled_from([(), (1, 4), (22, 23)]),
    allowed_token_ids=st.sampled_from([(), (), tuple(range(0, VOCAB_SIZE, 2)), (1, 2, 3, 5, 10**6)]),
    bad_words=st.sampled_from([(), (), ((2,), (10**6,)), ((0, 1), (1, 0, 2), (3, 5, 4)), ((5, 7), (0,), (0, 0))]),
    seed=U64,
)


@st.composite
def rows(draw):
    output = draw(st.lists(st.integers(0, 1) | st.integers(0, VOCAB_SIZE - 1), max_size=6))  # often in a bad word
    allowed = draw(st.none() | st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1))
    mask = None if allowed is None else mask_of(allowed)
    return Row(draw(samplings), len(PROMPT) + len(output), [*PROMPT, *output], len(PROMPT), mask)


def mask_of(allowed):
    return np.packbits([token in allowed for token in range(VOCAB_SIZE)], bitorder="little")


def allowed_by(row):
    """The row's mask in the reference's form."""
    return None if row.mask is None else np.unpackbits(row.mask, bitorder="little")[:VOCAB_SIZE].astype(bool)


def random_logits(num_rows, seed=0):
    """With ties and masked entries, as real rows have them."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(scale=4, size=(num_rows, VOCAB_SIZE)).round(1).astype(np.float32)
    logits[generator.random(logits.shape) < 0.05] = -np.inf
    return torch.from_numpy(logits)


@given(batch=st.lists(rows(), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_what_is_drawn_of_scores_is_what_is_drawn_of_the_distribution(batch, seed):
    """Where all rows are greedy none is made."""
    batch = [replace(row, sampling=replace(row.sampling, temperature=0.0)) for row in batch]
    scores = twin.adjusted(random_logits(len(batch), seed), batch)
    expected = twin.perturbed(twin.distribution(scores, batch), batch).argmax(dim=-1)
    assert twin.argmax(scores).tolist() == expected.tolist()


def test_of_several_that_are_alike_the_lowest_is_drawn():
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0], [-math.inf, -1.0, -math.inf, -1.0]])
    assert twin.argmax(scores).tolist() == [1, 1]


def is_bad(scores):
    """Whether each row gives no distribution, by its largest score."""
    _, largest = at_once(lambda of, readback: readback.argmax(of), scores)
    return [not math.isfinite(score) for score in largest]


def reference(raw, row):
    """None where the mask lets through only what has no logit: a bad row."""
    try:
        return sampling.log_probs(raw, row.sampling, row.tokens, row.prompt_len, allowed_by(row))
    except ValueError:
        scores = twin.adjusted(torch.from_numpy(raw)[None], [row])
        assert is_bad(scores) == [True]
        assert row.mask is not None
        return None


@settings(deadline=None, max_examples=2 * settings.default.max_examples)
@given(batch=st.lists(rows(), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_every_row_of_a_mixed_batch_equals_the_reference(batch, seed):
    logits = random_logits(len(batch), seed)
    untouched = logits.clone()
    log_p = twin.process(logits, batch)
    assert log_p.dtype == torch.float32
    assert torch.equal(logits, untouched)
    for row, raw, ours in zip(batch, logits.numpy(), log_p.numpy(), strict=True):
        expected = reference(raw, row)
        if expected is None:
            continue
        assert np.array_equal(np.isfinite(ours), np.isfinite(expected))
        kept = np.isfinite(expected)
        assert ours[kept] == pytest.approx(expected[kept], abs=2e-5, rel=1e-5)


@settings(deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_coupled_samples_equal_the_reference(batch, seed):
    log_p = twin.process(random_logits(len(batch), seed), batch)
    expected = [
        sampling.sample_coupled(row_log_p.astype(np.float64), row.sampling, row.position)
        for row, row_log_p in zip(batch, log_p.numpy(), strict=True)
    ]
    samples = twin.argmax(twin.perturbed(log_p, batch))
    assert samples.dtype == torch.int64
    assert samples.tolist() == expected
    assert at_once(lambda of, readback: twin.drawn(of, batch, readback), log_p) == expected


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"logit_bias": ((4, 9.0),)}], ids=str)
def test_each_cut_counts_at_temperature_one(cut):
    """Without any, p is the softmax of the logits as they are."""
    logits = random_logits(1)
    row = Row(Sampling(temperature=1.0, **cut), 9, [], 0)
    expected = sampling.log_probs(logits[0].numpy(), row.sampling, [], 0)
    assert twin.process(logits, [row])[0].exp().numpy() == pytest.approx(np.exp(expected), abs=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_row_has_the_same_bits_whatever_the_temperatures_of_others(temperature):
    """Alone it takes a shorter way: without a shift and a division at T = 1, else with one divisor."""
    logits = 9.0 * torch.randn(5, 1003, generator=torch.Generator().manual_seed(0))
    logits[0, 3], logits[1, 4], logits[2, 5] = -math.inf, math.inf, math.nan
    row = Row(Sampling(temperature=temperature), 9, [], 0)
    alone = twin.distribution(logits, [row] * 5)
    other = Row(Sampling(temperature=1.3), 9, [], 0)
    beside = twin.distribution(logits.repeat(2, 1), [row] * 5 + [other] * 5)[:5]
    assert np.array_equal(alone.numpy(), beside.numpy(), equal_nan=True)
    assert not torch.equal(alone[3], twin.distribution(logits[3:4], [other])[0])


def test_rows_of_one_position_share_their_noise():
    """Siblings of a tree stand at one position; their samples differ only through p."""
    row = Row(Sampling(seed=5), 9, [], 0)
    logits = random_logits(1).expand(3, -1)
    log_p = twin.process(logits, [row] * 3)
    assert len(set(twin.argmax(twin.perturbed(log_p, [row] * 3)).tolist())) == 1


@pytest.mark.parametrize("few", [1, 8, twin.FEW_KEPT])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.5, 0.9, 0.999, 1 - 2**-24])
def test_top_p_among_equals_keeps_those_of_a_stable_sort(top_p, few, monkeypatch):
    monkeypatch.setattr(twin, "FEW_KEPT", few)
    logits = (2.0 * torch.randn(40, 300, generator=torch.Generator().manual_seed(0))).round()
    logits[:20, ::3] = -math.inf
    logits[0], logits[1], logits[1, 7] = 0.0, -math.inf, 0.0
    rows = [Row(Sampling(top_p=top_p), 0, (), 0)] * len(logits)
    expected = np.stack([sampling.log_probs(row, rows[0].sampling, (), 0) for row in logits.numpy()])
    assert np.array_equal(np.isfinite(twin.process(logits, rows).numpy()), np.isfinite(expected))
    tempered = logits - logits.amax(dim=-1, keepdim=True)
    of_a_gpu = twin._outside_nucleus(tempered, torch.full((len(logits), 1), top_p, dtype=torch.float64))
    assert np.array_equal(np.isfinite(tempered.masked_fill(of_a_gpu, -math.inf).numpy()), np.isfinite(expected))


@pytest.mark.parametrize("top_p", [0.9999, 0.99999])
def test_the_end_of_top_p_among_unlikely_tokens_is_that_of_the_reference(top_p):
    """Rounding to float32, of `top_p` or of the sum, moves it in every second row or so."""
    logits = 4.0 * torch.randn(16, 20_000, generator=torch.Generator().manual_seed(0))
    rows = [Row(Sampling(top_p=top_p), 0, (), 0)] * len(logits)
    expected = np.stack([sampling.log_probs(row, rows[0].sampling, (), 0) for row in logits.numpy()])
    assert np.array_equal(np.isfinite(twin.process(logits, rows).numpy()), np.isfinite(expected))


@pytest.mark.parametrize("outside", [twin._outside_nucleus, twin._outside_nucleus_on_cpu])
def test_a_mass_that_is_just_reached_is_reached(outside):
    top_p = torch.tensor([[0.5 + sampling.TOP_P_SLACK]], dtype=torch.float64)
    assert outside(torch.zeros(1, 4), top_p).tolist() == [[False, False, True, True]]


@pytest.mark.parametrize("outside", [twin._outside_nucleus, twin._outside_nucleus_on_cpu])
def test_top_p_drops_nothing_of_a_row_of_nan(outside):
    """One NaN makes a row of nothing else, since all are shifted by the largest: it must not become a law again."""
    logits = torch.tensor([[math.nan] * 3, [-3.0, 0.0, -2.0]])
    is_outside = outside(logits, torch.full((2, 1), 0.5, dtype=torch.float64))
    assert is_outside.tolist() == [[False] * 3, [True, False, True]]


@settings(deadline=None)
@given(
    keys=st.lists(st.tuples(U64, st.integers(0, 2**32 - 1), st.integers(0, 63), st.sampled_from(Purpose)), min_size=1)
)
def test_noise_is_equal_bit_for_bit(keys):
    keys = [noise.key(*key) for key in keys]
    expected = noise.gumbel_rows(keys, 103)
    on_device = gumbel._gumbel_on_device(torch.tensor(keys), 103)
    assert on_device.dtype == torch.float32
    assert np.array_equal(on_device.numpy(), expected)
    assert np.array_equal(gumbel.gumbel_rows(keys + keys, 103, CPU).numpy(), np.concatenate([expected, expected]))


def test_noise_of_many_rows_is_made_in_parts_with_the_same_bits(monkeypatch):
    keys = torch.tensor([noise.key(seed, seed % 7, seed % 5, Purpose.SHARED) for seed in range(20)])
    whole = gumbel._gumbel_in_parts(keys, 103)
    on_device, sizes = gumbel._gumbel_on_device, []
    monkeypatch.setattr(gumbel, "FRESH_NUMBERS", 6 * 103)
    monkeypatch.setattr(gumbel, "_gumbel_on_device", lambda *given: sizes.append(len(given[0])) or on_device(*given))
    assert torch.equal(gumbel._gumbel_in_parts(keys, 103), whole)
    assert sizes == [6, 6, 6, 2]
    assert np.array_equal(whole.numpy(), noise.gumbel_rows(keys.tolist(), 103))


def test_noise_is_equal_bit_for_bit_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    keys = [noise.key(2**63 + seed, seed, seed % 5, Purpose.SHARED) for seed in range(64)]
    on_gpu = gumbel.gumbel_rows(keys, 10_001, torch.device("cuda"))
    assert np.array_equal(on_gpu.cpu().numpy(), noise.gumbel_rows(keys, 10_001))


def test_unusable_rows_are_told_apart():
    logits = torch.zeros(5, 4)
    logits[1, 2], logits[2, 0], logits[3], logits[4, 1] = math.nan, math.inf, -math.inf, -math.inf
    assert is_bad(logits) == [False, True, True, True, False]


@settings(deadline=None, max_examples=3 * settings.default.max_examples)
@given(row=rows(), raw=st.lists(st.floats(width=32), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE))
def test_any_row_of_float32_gives_a_law_or_is_told_apart(row, raw):
    """Infinite, subnormal and huge logits under parameters at the ends of their ranges; and as the reference has it."""
    logits = torch.tensor([raw])
    scores = twin.adjusted(logits, [row])
    has_no_law = is_bad(logits) == [True] or is_bad(scores) == [True]
    try:
        sampling.log_probs(logits[0].numpy(), row.sampling, row.tokens, row.prompt_len, allowed_by(row))
    except ValueError:
        assert has_no_law
    else:
        assert not has_no_law
        log_p = twin.distribution(scores, [row])
        assert float(log_p.exp().sum()) == pytest.approx(1.0, abs=1e-5)
        assert math.isfinite(log_p[0, twin.argmax(twin.perturbed(log_p, [row]))])


def test_the_coldest_temperature_does_not_overflow():
    row = Row(Sampling(temperature=1e-3), 4, [], 3)
    logits = torch.tensor([[3e38, 3e38, -3e38, 0.0]])
    assert twin.process(logits, [row]).exp().tolist() == [[0.5, 0.5, 0, 0]]


def test_plain_rows_do_not_pay_for_sorting(monkeypatch):
    """Nor for penalties or bias: the tokens are not even looked at."""
    monkeypatch.setattr(twin, "_outside_nucleus_on_cpu", None)
    monkeypatch.setattr(twin, "largest", None)
    row = Row(Sampling(), 4, None, 3)  # type: ignore[arg-type]  # never read
    assert twin.process(random_logits(2), [row, row]).exp().sum(dim=-1).tolist() == pytest.approx([1, 1])


def draw(log_q, batch, places, top_tokens):
    return at_once(drawn_guesses, *twin.cut(log_q, top_tokens), keys_of(batch, places))


def keys_of(batch, rows):
    return [noise.key(row.sampling.seed, row.position, at, Purpose.DRAFT) for row, at in zip(batch, rows, strict=True)]


@pytest.mark.parametrize("top_tokens", [1, 4, 64])
def test_guesses_are_drawn_from_the_very_q_that_is_sent(top_tokens):
    batch = [Row(Sampling(seed=2**63 + i, temperature=0.9), 10 + i, [], 3) for i in range(40)]
    log_q = twin.process(random_logits(40), batch)
    places = [i % 4 for i in range(40)]
    for i, (token, q) in enumerate(draw(log_q, batch, places, top_tokens)):
        reference = sampling.truncate(log_q[i].numpy().astype(np.float64), top_tokens)
        assert len(q.token_ids) == len(reference.token_ids)
        assert q.probs == pytest.approx(reference.probs, rel=1e-4)
        assert len(q.token_ids) <= top_tokens
        assert token == sampling.draw_guess(q, VOCAB_SIZE, batch[i].sampling.seed, batch[i].position, places[i])
        assert len(valid_prefix(TokenTree.chain([token], [q]), VOCAB_SIZE)) == 1


@pytest.mark.parametrize("with_replacement", [False, True])
@pytest.mark.parametrize("top_tokens", [2, 8])
def test_several_guesses_are_those_of_the_reference_in_their_order(top_tokens, with_replacement):
    batch = [Row(Sampling(seed=2**63 + i, temperature=0.9), 10 + i, [], 3) for i in range(40)]
    log_q = twin.process(random_logits(40), batch)
    keys = keys_of(batch, [noise.row_of(i % 4, 5 * i) for i in range(40)])
    probs, ids = twin.cut(log_q, top_tokens)
    found = at_once(partial(drawn_guesses, num_draws=4, with_replacement=with_replacement), probs, ids, keys)
    for (token, q), (_, position, row, _), of in zip(found, keys, batch, strict=True):
        want = sampling.draw_several(
            q, VOCAB_SIZE, of.sampling.seed, position, row, 4, with_replacement=with_replacement
        )
        assert q.draws == want
        assert token == want[0] == sampling.draw_guess(q, VOCAB_SIZE, of.sampling.seed, position, row)
        assert len(want) == (4 if with_replacement else min(4, len(q.token_ids)))


def test_noise_at_a_few_ids_is_that_of_whole_rows():
    keys = [noise.key(2**63 + i, 7, noise.row_of(3, i << 12), Purpose.DRAFT) for i in range(5)]
    ids = torch.randint(0, VOCAB_SIZE, (5, 9))
    assert torch.equal(
        gumbel.gumbel_at(torch.tensor(keys), ids), gumbel.gumbel_rows(keys, VOCAB_SIZE, CPU).gather(1, ids)
    )


def test_a_greedy_draft_is_sure():
    row = Row(Sampling(temperature=0), 4, [], 3)
    log_q = twin.process(random_logits(1), [row])
    [(token, q)] = draw(log_q, [row], [0], 8)
    assert (q.token_ids, q.probs) == ((token,), (1.0,))


def test_logprobs_are_those_of_the_raw_model():
    logits = random_logits(2, seed=3)
    expected = logits.log_softmax(dim=-1)
    for index, (entry, token) in enumerate(zip(at_once(twin.logprobs, logits, [4, 9], 3), [4, 9], strict=True)):
        assert entry.logprob == pytest.approx(float(expected[index, token]))
        assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
        assert all(value == pytest.approx(float(expected[index, token_id])) for token_id, value in entry.top)
        assert entry.top[0][1] == pytest.approx(float(expected[index].max()))
    assert at_once(twin.logprobs, logits, [4, 9], 0)[0].top == ()


def test_a_row_is_masked_by_its_own_mask_and_others_are_left_as_they_are():
    row = Row(Sampling(temperature=0.0), 4, [], 3)
    logits = random_logits(4)
    batch = [row, replace(row, mask=mask_of({3, 22})), row, replace(row, mask=mask_of({0}))]
    scores = twin.adjusted(logits, batch)
    assert torch.equal(scores[[0, 2]], logits[[0, 2]])
    assert [np.flatnonzero(scores[index].isfinite()).tolist() for index in (1, 3)] == [
        [token for token in allowed if logits[index, token].isfinite()] for index, allowed in ((1, [3, 22]), (3, [0]))
    ]
    assert twin.adjusted(logits, [row] * 4) is logits, "who asks for nothing pays for nothing"


def test_min_tokens_holds_until_a_grammar_lets_only_the_end_come():
    row = Row(Sampling(temperature=0.0, min_tokens=5, suppressed_ids=(1, 2)), 4, [], 3)
    logits = torch.zeros(2, VOCAB_SIZE)
    batch = [replace(row, mask=mask_of({1, 2, 7})), replace(row, mask=mask_of({1, 2}))]
    assert twin.process(logits, batch).argmax(dim=-1).tolist() == [7, 1]


def test_a_mask_that_lets_nothing_through_makes_a_bad_row():
    row = Row(Sampling(), 4, [], 3, mask_of(set()))
    assert is_bad(twin.adjusted(torch.zeros(1, VOCAB_SIZE), [row])) == [True]
