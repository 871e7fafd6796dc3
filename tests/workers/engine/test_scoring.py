"""Beam search by a target engine: the nodes of beams are scored once, and outputs are those of transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driving import Driver, answer

from core.beams import Beams
from core.config import EngineConfig
from core.records import BeamSearch, Sampling
from core.speculation import ROOT, TokenTree
from tests.checkpoints import EOS, VOCAB_SIZE, build, write
from workers.engine.target import TargetEngine

PROMPT = [5, 6, 7, 8, 9]
SOURCE = [20, 31, 22, 43, 24, 35]
GREEDY = Sampling(temperature=0.0)
MILD = {"mt5": {"initializer_factor": 2.0}, "bart": {"init_std": 0.5}}
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
