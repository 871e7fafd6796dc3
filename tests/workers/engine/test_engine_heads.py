"""A head's guesses, worked out by transformers: in the target's engine and, from a verdict's features, in a draft's."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from core.config import EngineConfig
from core.records import Continuation, Features, Refused, Sampling, Stamp, Verdict, Verification, Want
from core.speculation import ROOT, TreeSpec
from tests import checkpoints
from tests.workers.engine.driving import EPOCH, Driver, answer, chain, tree_of, wrong
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31]
GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=0.9, seed=3)
WANTS = (Want.FEATURES, Want.GUESSES)
NUM_HEADS = 3
HIDDEN = checkpoints.SIZES["hidden_size"]
WIDE = TreeSpec(8, 6, tail=(0.4, 0.3, 0.2), num_passes=6, reports_all=True)


def write_heads(path, weights):
    sizes = {"num_heads": len(weights), "hidden_size": HIDDEN, "vocab_size": checkpoints.SIZES["vocab_size"]}
    (path / "config.json").write_text(json.dumps({"model_type": "blockwise", **sizes}))
    save_file({f"heads.{index}.weight": weight for index, weight in enumerate(weights)}, path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(2)
    return [torch.randn(HIDDEN, HIDDEN) for _ in range(NUM_HEADS)]


@pytest.fixture(scope="module")
def head(tmp_path_factory, weights):
    return write_heads(tmp_path_factory.mktemp("head"), weights)


@pytest.fixture
def target(checkpoint, head):
    config = EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=512, feature_layers=(0, -1), head=head)
    return TargetEngine.load(config, EPOCH, lambda _: None)


@pytest.fixture
def draft(checkpoint, head):
    config = EngineConfig(checkpoint, block_tokens=4, kv_cache_tokens=512, head=head)
    return DraftEngine.load(config, EPOCH, 64, lambda _: None)


@pytest.fixture(scope="module")
def model():
    return checkpoints.build("llama")


@torch.inference_mode()
def states_of(model, text):
    return model(torch.tensor([text]), output_hidden_states=True).hidden_states


@torch.inference_mode()
def likeliest_by_hand(model, weights, text):
    """The likeliest token of each depth below the next one, from the state of the text's last token."""
    state = states_of(model, text)[-1][0, -1]
    return [int(model.lm_head(state + weight @ state)[: checkpoints.VOCAB_SIZE].argmax()) for weight in weights]


def likeliest_of(guesses):
    """The first child of each depth, from the root down."""
    tokens, end = [], ROOT
    while end in guesses.parents:
        end = guesses.parents.index(end)
        tokens.append(guesses.tokens[end])
    return tokens


def rows_of(features):
    numbers = np.frombuffer(features.rows, np.uint16).astype(np.uint32) << 16
    return torch.from_numpy(numbers.view(np.float32).reshape(-1, features.width).copy())


def judged(target, driver, block=None, wants=WANTS):
    request = driver.verify_request() if block is None else driver.verify_request(block)
    verdict = answer(target, replace(request, wants=wants))
    assert isinstance(verdict, Verdict)
    tokens = block.tokens if block is not None else ()
    driver.log.extend([*(tokens[node] for node in verdict.path), verdict.next_token])
    driver.held = verdict.held
    return verdict


def test_guesses_and_features_follow_the_accepted_path(target, model, weights):
    """After a block that is right to its second guess: the stale rows of the third must not be used."""
    plain = Driver(target, PROMPT, session="plain").run(4)
    driver = Driver(target, PROMPT)
    first = judged(target, driver)
    assert likeliest_of(first.guesses) == likeliest_by_hand(model, weights, PROMPT)
    verdict = judged(target, driver, chain(plain[1], plain[2], wrong(plain[3])))
    assert len(verdict.path) == 2
    text = [*PROMPT, *plain[:3]]
    assert likeliest_of(verdict.guesses) == likeliest_by_hand(model, weights, text)
    assert 0.0 < verdict.timing.guessing_s < verdict.timing.computed_s
    assert 8 < len(verdict.guesses) <= 40, "a tree: some nodes of each depth, by their path probability"
    assert (verdict.features.first, verdict.features.end) == (len(PROMPT), len(text))
    states = states_of(model, text)
    expected = torch.cat([states[0][0, len(PROMPT) :], states[-1][0, len(PROMPT) :]], dim=-1)
    torch.testing.assert_close(rows_of(verdict.features), expected, atol=0.02, rtol=0.01)


def test_nothing_unasked(target):
    verdict = judged(target, Driver(target, PROMPT), wants=())
    assert verdict.features is None
    assert len(verdict.guesses) == 0


def test_a_continued_verdict_has_them_too(target, model, weights):
    driver = Driver(target, PROMPT)
    request = replace(driver.verify_request(), wants=(*WANTS, Want.SAMPLES))
    target.add(request)
    target.add(Continuation(Stamp("s", EPOCH, 2), 1, chain(), is_open=True))
    verdicts = []
    while len(verdicts) < 2:
        verdicts += [reply for reply in target.step() if isinstance(reply, Verdict)]
    text = [*PROMPT, verdicts[0].next_token]
    assert likeliest_of(verdicts[1].guesses) == likeliest_by_hand(model, weights, text)
    assert verdicts[1].features.end == len(text)
    assert verdicts[1].samples == (), "questions are asked anew for each block"


def test_scored_prompt_rows_shift_nothing(target, model, weights):
    """Prompt scores drop rows of logits; features of the others must stay with them."""
    driver = Driver(target, PROMPT)
    driver.spec = replace(driver.spec, num_prompt_logprobs=2)
    verdict = judged(target, driver)
    assert len(verdict.prompt_logprobs) == len(PROMPT) - 1
    assert likeliest_of(verdict.guesses) == likeliest_by_hand(model, weights, PROMPT)


def test_a_coupled_guess_uses_the_noise_of_its_own_position(checkpoint, tmp_path):
    """A head that says what the target says, as it turns each state into the next: it must then always be right."""
    verdicts = []
    model = checkpoints.build("llama")
    target_config = EngineConfig(checkpoint, kv_cache_tokens=512, feature_layers=(-1,))
    engine = TargetEngine.load(target_config, EPOCH, lambda _: None)
    driver = Driver(engine, PROMPT, SEEDED)
    tokens = driver.run(2)
    state, following = (states_of(model, text)[-1][0, -1] for text in (PROMPT, [*PROMPT, tokens[0]]))
    exact = torch.outer(following - state, state) / state.dot(state)
    with_head = TargetEngine.load(replace(target_config, head=write_heads(tmp_path, [exact])), EPOCH, lambda _: None)
    verdicts.append(judged(with_head, Driver(with_head, PROMPT, SEEDED)))
    assert verdicts[0].next_token == tokens[0]
    assert verdicts[0].guesses.tokens[0] == tokens[1]


def test_a_draft_engine_guesses_the_same_from_the_features(checkpoint, head, draft):
    config = EngineConfig(checkpoint, kv_cache_tokens=512, feature_layers=(-1,), head=head)
    target = TargetEngine.load(config, EPOCH, lambda _: None)
    for sampling in (GREEDY, SEEDED):
        verifying = Driver(target, PROMPT, sampling, session=f"{sampling}")
        drafting = Driver(draft, PROMPT, sampling, session=f"{sampling}")
        for _ in range(3):  # each extends the text that the engine holds
            verdict = judged(target, verifying)
            drafting.log.extend([verdict.next_token])
            request = replace(drafting.draft_request(WIDE), features=verdict.features)
            update = answer(draft, request)
            drafting.held = update.held
            assert likeliest_of(tree_of(update))[0] == likeliest_of(verdict.guesses)[0]
            assert max(tree_of(update).depths) == NUM_HEADS, "no head guesses further"
            assert update.is_over
            draft.check_integrity()


def test_a_draft_that_samples_says_what_it_drew_from(checkpoint, head, draft):
    config = EngineConfig(checkpoint, kv_cache_tokens=512, feature_layers=(-1,))
    target = TargetEngine.load(config, EPOCH, lambda _: None)
    verdict = judged(target, Driver(target, PROMPT, SEEDED))
    drafting = Driver(draft, [*PROMPT, verdict.next_token], SEEDED, Verification.REJECTION)
    update = answer(draft, replace(drafting.draft_request(TreeSpec.chain(4)), features=verdict.features))
    assert len(update.new_nodes) == len(update.new_nodes.q) == NUM_HEADS


@pytest.mark.parametrize(
    ("features", "says"),
    [
        (None, "it has no features; this engine reads 32 numbers a token"),
        (Features(len(PROMPT) - 2, 16, bytes(32)), "16 numbers of features a token, not 32"),
        (Features(len(PROMPT) - 3, HIDDEN, bytes(2 * HIDDEN)), "of the tokens 3 to 4, and should end before 5"),
        (Features(-1, HIDDEN, bytes(2 * HIDDEN * len(PROMPT))), "of the tokens -1 to 5, and should end before 5"),
        (Features(len(PROMPT) - 2, HIDDEN, bytes(2 * HIDDEN + 1)), "65 bytes of features are no rows of 32 numbers"),
        (Features(len(PROMPT) - 1, HIDDEN, b""), "0 bytes of features are no rows of 32 numbers"),
    ],
    ids=["none", "width", "another text's", "before the text", "half a number", "no rows"],
)
def test_wrong_features_are_refused(draft, features, says):
    refused = answer(draft, replace(Driver(draft, PROMPT).draft_request(WIDE), features=features))
    assert isinstance(refused, Refused)
    assert says in refused.reason


def test_features_that_are_not_finite_end_the_guesses_alone(draft):
    nan = np.full(HIDDEN, 0x7FC0, np.uint16).tobytes()
    bad = Driver(draft, PROMPT, session="bad")
    request = replace(bad.draft_request(WIDE), features=Features(len(PROMPT) - 2, HIDDEN, nan))
    assert isinstance(answer(draft, request), Refused)
    good = Driver(draft, PROMPT, session="good")
    request = replace(good.draft_request(WIDE), features=Features(len(PROMPT) - 2, HIDDEN, bytes(2 * HIDDEN)))
    assert len(answer(draft, request).new_nodes) > 0


def test_a_guess_is_a_token_of_the_vocabulary(checkpoint, tmp_path):
    """The output layer has rows of padding, which no guess may name: one such guess disables the head."""
    torch.manual_seed(0)
    path = write_heads(tmp_path, [30 * torch.randn(HIDDEN, HIDDEN)])
    config = EngineConfig(checkpoint, kv_cache_tokens=4096, head=path)
    engine = TargetEngine.load(config, EPOCH, lambda _: None)
    random = torch.Generator().manual_seed(1)
    for number in range(40):
        prompt = torch.randint(0, 256, (6,), generator=random).tolist()
        guesses = judged(engine, Driver(engine, prompt, session=f"{number}")).guesses
        assert max(guesses.tokens) < checkpoints.VOCAB_SIZE


def test_a_draft_guesses_anew_from_the_newest_features_where_the_text_follows_its_guess(draft, model, weights):
    """The engine has a deeper head's guesses below that token, which it must not keep as those of the first head."""
    random = torch.Generator().manual_seed(5)
    old, new = (torch.randn(HIDDEN, generator=random).bfloat16() for _ in range(2))
    drafting = Driver(draft, PROMPT)

    def grown(states):
        rows = Features(len(drafting.log) - 2, HIDDEN, states.view(torch.int16).numpy().tobytes())
        update = answer(draft, replace(drafting.draft_request(WIDE), features=rows))
        drafting.held = update.held
        return likeliest_of(tree_of(update))

    first = grown(old)
    assert len(first) == NUM_HEADS
    drafting.log.extend([first[0]])
    states = new.float()
    with torch.inference_mode():
        logits = [model.lm_head(states + weight @ states)[: checkpoints.VOCAB_SIZE] for weight in weights]
    assert grown(new) == [int(each.argmax()) for each in logits]
