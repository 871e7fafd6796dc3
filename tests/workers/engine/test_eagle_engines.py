"""An EAGLE head at both places: what it guesses is the published algorithm's, from features of committed tokens."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from core.records import MAX_FEATURE_TOKENS, Missing, Sampling, Verdict, Want
from core.speculation import ROOT, TokenTree, TreeSpec
from core.text import TokenLog
from tests import checkpoints, eagle
from tests.workers.engine.driving import EPOCH, Driver, answer, chain, tree_of, wrong
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

PROMPT = [5, 17, 99, 4, 200, 31, 8]
GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(temperature=0.9, seed=3)
LAYERS = tuple(eagle.LAYER_IDS)
WANTS = (Want.FEATURES, Want.PREFIX_FEATURES, Want.GUESSES)
CHAIN = replace(TreeSpec.chain(4), reports_all=True)
CONFIG = {"block_tokens": 4, "kv_cache_tokens": 1024}


@pytest.fixture(scope="module", params=["own", "borrowed"])
def written(request, tmp_path_factory):
    """A head with an output layer of its own, or with its target's."""
    path = tmp_path_factory.mktemp("head")
    if request.param == "own":
        return eagle.head_at(path)
    config = {**eagle.CONFIG, "draft_vocab_size": eagle.VOCAB}
    tensors = eagle.tensors_of(config)
    for name in eagle.OWN:
        del tensors[name]
    return eagle.write(path, config, tensors), tensors


@pytest.fixture(scope="module")
def head(written):
    return written[0]


@pytest.fixture(scope="module")
def model():
    return checkpoints.build("llama")


@pytest.fixture
def target(checkpoint, head):
    config = EngineConfig(checkpoint, feature_layers=LAYERS, head=head, head_passes=4, **CONFIG)
    return native(TargetEngine.load(config, EPOCH, lambda _: None))


@pytest.fixture
def draft(checkpoint, head):
    return native(DraftEngine.load(EngineConfig(checkpoint, head=head, **CONFIG), EPOCH, 64, lambda _: None))


def native(engine):
    """The engine, with its head as a program."""
    told = []
    engine.warm_up(told.append)
    assert "a step of the head is a program, run by 1 threads" in told
    return engine


@torch.inference_mode()
def states_of(model, text):
    """The hidden states that the head reads, rounded as they are sent.  # [tokens, 3 * hidden]"""
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    last = []  # transformers' last state is after the final norm; a head reads the one before
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    model(torch.tensor([text]))
    hook.remove()
    layers = [last[0] if layer == len(states) - 1 else states[layer] for layer in LAYERS]
    return torch.cat([each[0] for each in layers], dim=-1).bfloat16().float()


def guessed_by_hand(written, model, text, depth, first=1):
    """The chain of likeliest tokens below the text; only its tokens from `first` on have rows."""
    tensors = written[1]
    output = model.lm_head.weight.detach()
    embedding = tensors.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())
    reference = eagle.Reference(eagle.CONFIG, tensors, embedding, output)
    return grown_by_hand(reference, text, reference.commit(text, states_of(model, text[:-1]), first), depth)


def grown_by_hand(reference, text, seen, depth):
    tokens = []
    for position in range(len(text) - 1, len(text) - 1 + depth):
        tokens.append(int(reference.logits(seen[-1]).argmax()))
        seen.append(reference.row(tokens[-1], reference.own_feature(seen[-1]), position, seen[:]))
    return tokens


def likeliest_of(guesses):
    """The first child of each depth, from the root down."""
    tokens, end = [], ROOT
    while end in guesses.parents:
        end = guesses.parents.index(end)
        tokens.append(guesses.tokens[end])
    return tokens


def agree(guesses, by_hand, least=2):
    """Whether a chain is that worked out by hand. The head stops where its guesses become unlikely."""
    found = likeliest_of(guesses)
    assert len(found) >= least
    assert found == by_hand[: len(found)]


def judged(target, driver, block=None, wants=WANTS):
    request = driver.verify_request() if block is None else driver.verify_request(block)
    verdict = answer(target, replace(request, wants=wants))
    assert isinstance(verdict, Verdict)
    tokens = block.tokens if block is not None else ()
    driver.log.extend([*(tokens[node] for node in verdict.path), verdict.next_token])
    driver.held = verdict.held
    target.check_integrity()
    return verdict


def drafted(draft, drafting, verdict, growth=CHAIN):
    drafting.log.extend(drafting.verified[len(drafting.log) :])
    first = max(0, min(drafting.held, len(drafting.log) - 1) - 1)
    request = replace(drafting.draft_request(growth), features=verdict.features.since(first))
    update = answer(draft, request)
    drafting.held = update.held
    draft.check_integrity()
    return tree_of(update)


def rows_of(features):
    numbers = np.frombuffer(features.rows, np.uint16).astype(np.uint32) << 16
    return torch.from_numpy(numbers.view(np.float32).reshape(-1, features.width).copy())


def test_both_places_guess_what_the_algorithm_does(target, draft, written, model):
    """After the prompt, after a block that is right to its second guess, after a plain step, and after a tree whose
    second branch is right: rows of rejected guesses are gone, and accepted ones are computed again from the target's
    features."""
    plain = Driver(target, PROMPT, session="plain").run(9)
    branches = TokenTree((wrong(plain[5]), plain[5], plain[6]), (ROOT, ROOT, 1))
    verifying = Driver(target, PROMPT)
    drafting = Driver(draft, PROMPT)
    drafting.verified = verifying.log.tokens
    for block in (None, chain(plain[1], plain[2], wrong(plain[3])), None, branches, chain(wrong(plain[8]))):
        verdict = judged(target, verifying, block)
        text = list(verifying.log.tokens)
        assert verdict.features.end == len(text) - 1
        by_hand = guessed_by_hand(written, model, text, 4)
        agree(verdict.guesses, by_hand)
        assert likeliest_of(drafted(draft, drafting, verdict)) == by_hand


def test_an_accepted_guess_of_its_own_is_computed_again(target, draft, written, model):
    """The draft holds rows of these tokens, made from its own features, which it must not keep."""
    verifying = Driver(target, PROMPT)
    drafting = Driver(draft, PROMPT)
    verdict = judged(target, verifying)
    drafting.verified = list(verifying.log.tokens)
    text = [*verifying.log.tokens, *likeliest_of(drafted(draft, drafting, verdict))[:2]]  # as if they were accepted
    states = states_of(model, text[:-1])[-2:]
    rows = states.bfloat16().view(torch.int16).numpy().tobytes()
    verdict = replace(verdict, features=replace(verdict.features, first=len(text) - 3, rows=rows))
    drafting.verified = text
    assert likeliest_of(drafted(draft, drafting, verdict)) == guessed_by_hand(written, model, text, 4)


def test_features_of_the_prefix_come_chunk_by_chunk(checkpoint, head, model):
    config = EngineConfig(checkpoint, feature_layers=LAYERS, max_step_tokens=16, **CONFIG)
    target = TargetEngine.load(config, EPOCH, lambda _: None)
    text = [token % 250 for token in range(7, 7 + 3 * MAX_FEATURE_TOKENS // 2)]
    verdict = judged(target, Driver(target, text), wants=WANTS[:2])
    assert (verdict.features.first, verdict.features.end) == (len(text) - 1 - MAX_FEATURE_TOKENS, len(text))
    expected = states_of(model, text)[verdict.features.first :]
    torch.testing.assert_close(rows_of(verdict.features), expected, atol=0.03, rtol=0.02)
    assert judged(target, Driver(target, text, session="unasked"), wants=WANTS[:1]).features.num_tokens == 1


def test_a_reused_prefix_is_computed_again_in_part(target, draft, written, model):
    """The target adopts the KV of most of a prompt; the head has rows for the rest, and guesses from these."""
    prompt = [(7 * token) % 250 for token in range(160)]
    judged(target, Driver(target, prompt, session="first"))
    verifying = Driver(target, prompt, session="second")
    verdict = judged(target, verifying)
    assert 0 < verdict.num_cached < len(prompt) - 64
    assert verdict.features.first == verdict.num_cached
    text = list(verifying.log.tokens)
    by_hand = guessed_by_hand(written, model, text, 4, first=verdict.num_cached + 1)
    agree(verdict.guesses, by_hand)
    drafting = Driver(draft, prompt)
    drafting.verified = text
    assert likeliest_of(drafted(draft, drafting, verdict)) == by_hand


def test_prompt_scores_shift_no_features(target, written, model):
    verifying = Driver(target, PROMPT)
    verifying.spec = replace(verifying.spec, num_prompt_logprobs=2)
    verdict = judged(target, verifying)
    assert len(verdict.prompt_logprobs) == len(PROMPT) - 1
    agree(verdict.guesses, guessed_by_hand(written, model, list(verifying.log.tokens), 4))


def test_a_preempted_draft_goes_on_from_what_it_is_sent(draft, target, written, model):
    """It says that it misses the text, and gets all of it with the newest features alone."""
    verifying = Driver(target, PROMPT)
    drafting = Driver(draft, PROMPT)
    verdict = judged(target, verifying)
    drafting.verified = verifying.log.tokens
    drafted(draft, drafting, verdict)
    draft._store.drop("s")
    verdict, drafting.held = judged(target, verifying), 0
    text = list(verifying.log.tokens)
    by_hand = guessed_by_hand(written, model, text, 4, first=len(text) - 1)
    assert likeliest_of(drafted(draft, drafting, verdict)) == by_hand


def test_a_target_that_lost_a_text_brings_its_features_again(checkpoint, head, draft, written, model):
    """An older session takes the KV of this one, in the cache, too. The target then computes the text again, and both
    heads guess from its features as if nothing had been lost."""
    config = EngineConfig(
        checkpoint, feature_layers=LAYERS, head=head, head_passes=4, block_tokens=4, kv_cache_tokens=48
    )
    target = native(TargetEngine.load(config, EPOCH, lambda _: None))
    older, verifying = Driver(target, PROMPT[::-1], session="older"), Driver(target, PROMPT)
    older.verify()
    judged(target, verifying)
    older.run(40)
    missing = answer(target, verifying.verify_request())
    assert isinstance(missing, Missing)
    assert missing.held == 0
    target.release(["older"])
    verifying.held = 0
    verdict = judged(target, verifying)
    assert (verdict.num_cached, verdict.features.first) == (0, 0)
    text = list(verifying.log.tokens)
    by_hand = guessed_by_hand(written, model, text, 4)
    agree(verdict.guesses, by_hand)
    drafting = Driver(draft, PROMPT)
    drafting.verified = text
    assert likeliest_of(drafted(draft, drafting, verdict)) == by_hand


@pytest.mark.parametrize("seed", range(8))
def test_the_head_has_rows_of_all_that_was_computed_of_a_text(checkpoint, head, written, model, seed):
    """Texts are cut, go on otherwise, also to the same length, or are lost; some verdicts bring no guesses."""
    config = EngineConfig(checkpoint, feature_layers=LAYERS, head=head, head_passes=4, share_prefixes=False, **CONFIG)
    target, random = native(TargetEngine.load(config, EPOCH, lambda _: None)), Random(seed)
    driver, known, first = Driver(target, PROMPT), [], 1
    for _ in range(12):
        held = list(driver.log.tokens[: driver.held])
        match random.choice(("go on", "cut", "cut", "lose", "say nothing")):
            case "cut":
                num_tokens, num_kept = len(driver.log), random.randrange(2, len(driver.log))
                driver.log.truncate(num_kept)
                driver.log.extend(random.choices(range(250), k=random.choice((0, num_tokens - num_kept, 8))))
            case "lose":
                target._store.drop("s")
                held = []
            case "say nothing":
                judged(target, driver, wants=())
                continue
        driver.held = common(held, driver.log.tokens)
        computed_from = min(driver.held, len(driver.log) - 1)
        block = chain(*random.choices(range(250), k=random.randrange(3)))
        verdict, text = judged(target, driver, block, wants=(Want.GUESSES,)), list(driver.log.tokens)
        num_rows = min(common(known, text), len(text) - 1)
        if num_rows < first or num_rows <= computed_from:  # a row needs the feature of the token before
            first = computed_from + 1
        known = text
        agree(verdict.guesses, guessed_by_hand(written, model, text, 4, first), least=0)


def common(one, other):
    """Length of the common prefix."""
    return TokenLog(one).common_prefix_len(0, other)


def test_coupled_and_rejection_specs(target, draft):
    """Seeded guesses are the same at both places; a rule that needs q gets the likeliest tokens at the target."""
    verifying = Driver(target, PROMPT, SEEDED)
    drafting = Driver(draft, PROMPT, SEEDED)
    for _ in range(3):
        verdict = judged(target, verifying)
        drafting.verified = verifying.log.tokens
        found = likeliest_of(verdict.guesses)
        assert found
        assert found == likeliest_of(drafted(draft, drafting, verdict))[: len(found)]


def test_sessions_of_one_pass_do_not_mix(target, written, model):
    drivers = [Driver(target, [number, *PROMPT[: 3 + number]], session=f"{number}") for number in range(3)]
    requests = [replace(driver.verify_request(), wants=WANTS) for driver in drivers]
    for request in requests:
        target.add(request)
    verdicts = {}
    while len(verdicts) < len(drivers):
        verdicts.update({reply.stamp.lease: reply for reply in target.step()})
    for driver in drivers:
        verdict = verdicts[driver.session]
        text = [*driver.log.tokens, verdict.next_token]
        agree(verdict.guesses, guessed_by_hand(written, model, text, 4))
    target.release([driver.session for driver in drivers])
    assert target._grown._engine.stats().num_sessions == 0


def test_a_heads_memory_is_counted(checkpoint, head):
    """A token takes the head's KV, too, so fewer fit."""
    sizes = []
    for path in (None, head):
        config = EngineConfig(checkpoint, kv_cache_tokens=None, kv_memory_share=1e-9, head=path)
        with pytest.raises(Exception, match="a block of 16 tokens takes") as error:
            TargetEngine.load(config, EPOCH, lambda _: None)
        sizes.append(float(str(error.value).rpartition("takes ")[2].split()[0]))
    assert sizes[1] > 1.5 * sizes[0]


def test_eagle_1_guesses_what_its_algorithm_does_at_both_places(checkpoint, model, tmp_path):
    tensors = eagle.first_tensors_of(eagle.FIRST_CONFIG)
    head = eagle.write(tmp_path, eagle.FIRST_CONFIG, tensors, "pytorch_model.bin")
    config = EngineConfig(checkpoint, head=head, **CONFIG)
    target = TargetEngine.load(replace(config, feature_layers=(-1,), head_passes=4), EPOCH, lambda _: None)
    draft = DraftEngine.load(config, EPOCH, 64, lambda _: None)
    plain = Driver(target, PROMPT, session="plain").run(3)
    verifying, drafting = Driver(target, PROMPT), Driver(draft, PROMPT)
    drafting.verified = verifying.log.tokens
    for block in (None, chain(plain[1], wrong(plain[2]))):
        verdict = judged(target, verifying, block)
        text = list(verifying.log.tokens)
        reference = eagle.FirstReference(
            eagle.FIRST_CONFIG, tensors, tensors["embed_tokens.weight"], model.lm_head.weight.detach()
        )
        states = model.model(torch.tensor([text[:-1]])).last_hidden_state[0].detach().bfloat16().float()
        by_hand = grown_by_hand(reference, text, reference.commit(text, states), 4)
        agree(verdict.guesses, by_hand, least=1)
        assert likeliest_of(drafted(draft, drafting, verdict)) == by_hand
