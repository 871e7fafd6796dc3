"""Beam search by a target engine: the nodes of beams are scored once, and outputs are those of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driving import Driver, answer, poisoned

from core.beams import Beams
from core.config import EngineConfig
from core.records import BeamSearch, Refused, Sampling, is_sound
from core.speculation import ROOT, TokenTree
from tests.checkpoints import EOS, VOCAB_SIZE, build, write
from workers.engine.target import TargetEngine

PROMPT = [5, 6, 7, 8, 9]
SOURCE = [20, 31, 22, 43, 24, 35]
GREEDY = Sampling(temperature=0.0)
MILD = {"mt5": {"initializer_factor": 1.0}, "bart": {"init_std": 0.2}}
"""Changes that keep scores small: float32 has seven digits."""


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "bart", "mt5"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def path(family, tmp_path_factory):
    return str(write(family, tmp_path_factory.mktemp(family), vocab_size=VOCAB_SIZE, **MILD.get(family, {})))


@pytest.fixture
def engine(path):
    return load(path)


def load(path, **settings):
    config = EngineConfig(path, **{"kv_cache_tokens": 1024, "block_tokens": 4, "max_context_tokens": 60} | settings)
    return TargetEngine.load(config, 7, lambda _: None)


def is_pair(engine):
    return bool(engine.info.max_source_tokens)


class BeamDriver(Driver):
    """Sends the live beams as a tree below what they share."""

    def __init__(self, engine, search, num_tokens, sampling=GREEDY, session="s", eos=(EOS,)):
        prompt, num_source = ([*SOURCE, 0], len(SOURCE)) if is_pair(engine) else (PROMPT, 0)
        super().__init__(engine, prompt, sampling, session=session)
        count = Beams.num_likeliest(search, len(eos))
        self.spec = replace(self.spec, num_source=num_source, num_likeliest=count)
        self.beams = Beams(search, frozenset(eos), num_tokens)
        self.prompt = prompt

    def request(self, guesses=()):
        """`guesses`: outputs that are scored ahead, besides the beams."""
        shared = self.beams.num_shared
        self.log.extend([*self.prompt, *self.beams.live[0].tokens[:shared]][len(self.log) :])
        self.texts = texts = {(): ROOT}
        tokens, parents = [], []
        for beam in [*(beam.tokens for beam in self.beams.live), *guesses]:
            for end in range(shared + 1, len(beam) + 1):
                if beam[shared:end] not in texts:
                    texts[beam[shared:end]] = len(tokens)
                    tokens.append(beam[end - 1])
                    parents.append(texts[beam[shared : end - 1]])
        self.shared = shared
        return self.verify_request(TokenTree(tuple(tokens), tuple(parents)))

    def take(self, verdict):
        self.held = verdict.held
        scored = {text: verdict.likeliest[node + 1] for text, node in self.texts.items()}
        while not self.beams.is_done and all(beam.tokens[self.shared :] in scored for beam in self.beams.live):
            self.beams.step([scored[beam.tokens[self.shared :]] for beam in self.beams.live])

    def run(self, guess=lambda _: ()):
        while not self.beams.is_done:
            verdict = answer(self.engine, self.request(guess(self.beams.live)))
            self.engine.check_integrity()
            self.take(verdict)
        return [(list(each.beam.tokens), each.score) for each in self.beams.outputs]


def of_transformers(engine, family, search, num_tokens, **settings):
    model = build(family, vocab_size=VOCAB_SIZE, **MILD.get(family, {}))
    ids = torch.tensor([SOURCE if is_pair(engine) else PROMPT])
    model.generation_config.eos_token_id = EOS
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            num_beams=search.width,
            num_return_sequences=search.num_outputs,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping,
            output_scores=True,
            return_dict_in_generate=True,
            **{"eos_token_id": EOS, "pad_token_id": 0} | settings,
        )
    first = 1 if is_pair(engine) else len(PROMPT)
    outputs = [_without_padding(each[first:].tolist(), settings.get("eos_token_id", EOS)) for each in found.sequences]
    return list(zip(outputs, found.sequences_scores.tolist(), strict=True))


def _without_padding(tokens, eos):
    ends = [eos] if isinstance(eos, int) else eos
    return next((tokens[: number + 1] for number, token in enumerate(tokens) if token in ends), tokens)


def assert_same(found, want):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want]
    assert [score for _, score in found] == pytest.approx([score for _, score in want], abs=1e-4, rel=2e-5)


def common_tokens(engine):
    """Tokens that come often, to end outputs with: random models hardly ever end."""
    driver = BeamDriver(engine, BeamSearch(4, 4), 12, session="common", eos=())
    counts = {}
    for tokens, _ in driver.run():
        for token in tokens[2:]:
            counts[token] = counts.get(token, 0) + 1
    return sorted(counts, key=lambda token: (-counts[token], token))


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("num_ends", [1, 3])
def test_outputs_and_scores_are_those_of_transformers(engine, family, early_stopping, length_penalty, num_ends):
    search = BeamSearch(4, 3, length_penalty, early_stopping)
    ends = common_tokens(engine)[:num_ends]
    want = of_transformers(engine, family, search, 16, eos_token_id=ends)
    assert_same(BeamDriver(engine, search, 16, eos=ends).run(), want)


@pytest.fixture
def llama(tmp_path):
    return load(str(write("llama", tmp_path, vocab_size=VOCAB_SIZE)))


def right(best):
    """Guesses that are right for the best beam, and two that are wrong."""

    def guess(live):
        size = len(live[0].tokens)
        return [*(best[: size + ahead] for ahead in (1, 2)), (*live[0].tokens, 3), (*live[-1].tokens, 3, 4)]

    return guess


def test_guesses_change_no_output(engine):
    search = BeamSearch(3, 3)
    want = BeamDriver(engine, search, 16).run()
    assert_same(BeamDriver(engine, search, 16, session="guessing").run(right(tuple(want[0][0]))), want)


def test_guesses_for_all_beams_save_passes(llama):
    search = BeamSearch(2, 2)
    seen = []
    plain = BeamDriver(llama, search, 16)
    while not plain.beams.is_done:
        seen.append([beam.tokens for beam in plain.beams.live])
        plain.take(answer(llama, plain.request()))
    guessing, num_steps = BeamDriver(llama, search, 16, session="guessing"), llama.stats().num_steps
    guessing.run(lambda live: [text for texts in seen for text in texts if len(text) > len(live[0].tokens)])
    assert llama.stats().num_steps - num_steps == 1
    assert [each.beam.tokens for each in guessing.beams.ended] == [each.beam.tokens for each in plain.beams.ended]


def test_a_node_is_computed_once(llama):
    driver = BeamDriver(llama, BeamSearch(4, 4), 12)
    num_nodes = 0
    while not driver.beams.is_done:
        num_nodes += len(driver.beams.live)
        driver.take(answer(llama, driver.request()))
    assert llama.stats().num_rows == len(PROMPT) + num_nodes - 1, "of the first pass there is but the prompt"


def test_a_dropped_beam_leaves_no_kv(llama):
    """Neither it nor a wrong guess: the engine holds the text, and the nodes of the last block."""
    driver, num_dropped = BeamDriver(llama, BeamSearch(3, 3), 12), 0
    while not driver.beams.is_done:
        before = llama.stats().num_rows
        request = driver.request([(*driver.beams.live[0].tokens, 3)])
        driver.take(answer(llama, request))
        held = llama._store.find("s")
        assert held.kv.num_tokens == request.num_committed + len(request.block)
        num_dropped += llama.stats().num_rows - before
    assert num_dropped > held.kv.num_tokens, "more was computed than is held at the end"


def test_what_it_holds_is_not_kept_free_for_it_again(llama):
    """Else other sessions would wait although there is room for them."""
    driver = BeamDriver(llama, BeamSearch(3, 3), 12)
    while not driver.beams.is_done:
        request = driver.request()
        driver.take(answer(llama, request))
    assert len(request.block) > 3
    assert llama._store.find("s").num_guesses == 3


def test_beams_that_outgrow_the_kv_cache_are_refused_by_name(tmp_path):
    narrow = load(str(write("llama", tmp_path, vocab_size=VOCAB_SIZE)), kv_cache_tokens=24)
    driver = BeamDriver(narrow, BeamSearch(4, 4), 16)
    while not driver.beams.is_done:
        reply = answer(narrow, driver.request())
        if isinstance(reply, Refused):
            break
        driver.take(reply)
    assert (reply.field, reply.reason.startswith("have ")) == ("beams", True)


def test_what_is_sent_again_is_scored_again(llama):
    driver = BeamDriver(llama, BeamSearch(3, 3), 12)
    for _ in range(4):
        driver.take(answer(llama, driver.request()))
    first = answer(llama, driver.request())
    again = answer(llama, driver.request())
    assert all(again.likeliest), "nothing was new, so that it may have been asked for anything"
    for one, other in [each for each in zip(first.likeliest, again.likeliest, strict=True) if each[0]]:
        assert [logprob for _, logprob in one] == pytest.approx([logprob for _, logprob in other], abs=1e-4)
    llama.check_integrity()


def test_an_engine_that_has_lost_its_kv_scores_all_beams_from_the_text(llama):
    """The KV is lost after a crash, or after preemption."""
    search = BeamSearch(3, 3)
    want = BeamDriver(llama, search, 16).run()
    driver = BeamDriver(llama, search, 16, session="losing")
    for round_ in range(100):
        if driver.beams.is_done:
            break
        if round_ in (3, 7):
            llama._store.drop("losing")
            driver.held = 0
        driver.take(answer(llama, driver.request()))
        llama.check_integrity()
    assert_same([(list(each.beam.tokens), each.score) for each in driver.beams.outputs], want)


def test_searches_share_a_pass_with_other_sessions_and_change_nothing(llama):
    search = BeamSearch(3, 3)
    want = BeamDriver(llama, search, 12).run()
    plain = Driver(llama, PROMPT, session="plain").run(12)
    driver, other = BeamDriver(llama, search, 12, session="beams"), Driver(llama, PROMPT, session="other")
    while not driver.beams.is_done:
        llama.add(other.verify_request())
        llama.add(driver.request())
        num_steps = llama.stats().num_steps
        replies = {reply.stamp.lease: reply for reply in llama.step()}
        assert llama.stats().num_steps == num_steps + 1
        driver.take(replies["beams"])
        other.log.extend([replies["other"].next_token])
        other.held = replies["other"].held
        llama.check_integrity()
    assert_same([(list(each.beam.tokens), each.score) for each in driver.beams.outputs], want)
    assert list(other.log.tokens[len(PROMPT) :])[:12] == plain[: len(other.log) - len(PROMPT)]


def test_little_memory_changes_no_output(path):
    """One search and others that need its blocks: whoever loses KV sends its text again."""
    roomy, narrow = load(path), load(path, kv_cache_tokens=96)
    search = BeamSearch(3, 3)
    want = BeamDriver(roomy, search, 12).run()
    drivers = [BeamDriver(narrow, search, 12, session=f"s{number}") for number in range(3)]
    for _ in range(300):
        open_ = [each for each in drivers if not each.beams.is_done]
        if not open_:
            break
        for each in open_:
            narrow.add(each.request())
        replies = {}
        for _ in range(30):
            if not narrow.has_work or len(replies) == len(open_):
                break
            replies.update({reply.stamp.lease: reply for reply in narrow.step()})
            narrow.check_integrity()
        for each in open_:
            reply = replies.get(each.session)
            if hasattr(reply, "likeliest"):
                each.take(reply)
                if each.beams.is_done:
                    narrow.release([each.session])
            else:
                each.held = 0
    for each in drivers:
        assert_same([(list(end.beam.tokens), end.score) for end in each.beams.outputs], want)


def test_a_root_with_nan_is_refused_and_a_beam_with_nan_is_reported_as_such(llama):
    driver = BeamDriver(llama, BeamSearch(3, 3), 12)
    with poisoned(llama, 0):
        assert isinstance(answer(llama, driver.request()), Refused)
    driver = BeamDriver(llama, BeamSearch(3, 3), 12, session="other")
    driver.take(answer(llama, driver.request()))
    with poisoned(llama, 1):
        verdict = answer(llama, driver.request())
    assert [is_sound(each) for each in verdict.likeliest[1:]] == [True, False, True]
    llama.check_integrity()


def test_a_beam_that_nothing_may_follow_is_none_with_nan(llama):
    """Nor is a text that nothing may follow at all."""
    forbids_all = replace(GREEDY, allowed_token_ids=(7,), bad_words=((7, 7),))
    driver = BeamDriver(llama, BeamSearch(2, 2), 12, forbids_all)
    first = answer(llama, driver.request())
    assert [token for token, _ in first.likeliest[0]] == [7]
    driver.take(first)
    assert answer(llama, driver.request()).likeliest == ((),)


def test_only_what_is_new_is_reported(llama):
    """However long ago the beams parted."""
    driver, num_parted = BeamDriver(llama, BeamSearch(3, 3), 12), 0
    while not driver.beams.is_done:
        num_live, request = len(driver.beams.live), driver.request()
        verdict = answer(llama, request)
        num_parted = max(num_parted, len(request.block) - num_live)
        assert sum(map(bool, verdict.likeliest)) == num_live
        driver.take(verdict)
    assert num_parted > 0


@pytest.mark.parametrize(
    ("sampling", "settings"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"bad_words": ((249,), (98, 261))}, {"bad_words_ids": [[249], [98, 261]]}),
        ({"min_tokens": 6, "suppressed_ids": (EOS,)}, {"min_new_tokens": 6}),
    ],
)
def test_penalties_and_masks_are_those_of_transformers(llama, sampling, settings):
    search = BeamSearch(3, 3)
    driver = BeamDriver(llama, search, 12, replace(GREEDY, **sampling))
    assert_same(driver.run(), of_transformers(llama, "llama", search, 12, **settings))
