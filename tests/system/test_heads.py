"""A head guesses at the target's engine, or at the draft's from features that verdicts carry: no token changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from local import DEMO, request, system

from core.config import EngineConfig, SpeculationConfig
from core.records import Missing, Sampling, Verification
from orchestrator.text.tokenizer import Tokenizer
from tests import eagle
from workers.engine.draft import DraftEngine
from workers.heads import fit_heads

NUM_TOKENS = 24
PROMPTS = ["def parse_args(self, args):\n    ", "import os\nimport sys\n\n", "class Path:\n    def __init__(self"]
SAMPLINGS = {
    "greedy": (Sampling(temperature=0.0), Verification.COUPLED),
    "coupled": (Sampling(temperature=0.8, seed=17), Verification.COUPLED),
    "rejection": (Sampling(temperature=0.8, seed=17), Verification.REJECTION),
}
TREE = SpeculationConfig(policy="static_tree", max_block_tokens=4, draft_timeout_s=30.0)
IN_TURN = replace(TREE, pipelining=False)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """Fitted on the sources of a few modules of the standard library."""
    import argparse
    import inspect
    import json
    import pathlib

    tokenizer = Tokenizer.from_directory(DEMO / "target")
    texts = [tokenizer.encode(inspect.getsource(module))[:512] for module in (argparse, pathlib, json, inspect)]
    return fit_heads(EngineConfig(str(DEMO / "target")), texts, num_heads=3).write(tmp_path_factory.mktemp("head"))


def places(head):
    return {
        "target": {"draft": None, "targets": {"head": str(head)}},
        "draft": {"draft": DEMO / "target", "drafts": {"head": str(head)}, "targets": {"feature_layers": (-1,)}},
    }


async def streams(served, *names, is_in_turn=False):
    """Tokens of all prompts by the name of a sampling, by default all; and sources. Streams share their steps, which
    cost the same for one, unless they come one after the other."""
    jobs = [
        request(served.tokenizer.encode(text), NUM_TOKENS, sampling=sampling, verification=verification)
        for sampling, verification in map(SAMPLINGS.get, names or SAMPLINGS)
        for text in PROMPTS
    ]
    one_by_one = [await served.complete(job) for job in jobs] if is_in_turn else []
    chunks = one_by_one or await asyncio.gather(*map(served.complete, jobs))
    tokens = iter([[token for chunk in each for token in chunk.token_ids] for each in chunks])
    return {name: [next(tokens) for _ in PROMPTS] for name in names or SAMPLINGS}, [
        source for each in chunks for source in each[-1].stats.sources
    ]


PLAIN: dict[str, list[list[int]]] = {}
"""Expected outputs by sampling; computed once."""


async def plain_outputs():
    if not PLAIN:
        async with system(draft=None) as served:
            PLAIN.update((await streams(served))[0])
    return PLAIN


async def check_tokens(tokens):
    """Compare with plain decoding. By rejection, guesses change which tokens are drawn, not their distribution."""
    plain = await plain_outputs()
    for name in tokens.keys() - {"rejection"}:
        assert tokens[name] == plain[name], name


@pytest.mark.parametrize("place", ["target", "draft"])
async def test_no_token_changes_and_some_guesses_are_right(head, place):
    name = "head" if place == "target" else "draft"
    async with system(speculation=replace(TREE, guessers=(name,)), is_patient=True, **places(head)[place]) as served:
        tokens, sources = await streams(served)
        await served.check_nothing_is_held()
    await check_tokens(tokens)
    assert {source.name for source in sources} == {name}
    num_prompts = len(PROMPTS)
    for first in range(0, len(sources), num_prompts):
        assert sum(source.num_accepted_tokens for source in sources[first : first + num_prompts]) > 0


async def test_a_draft_in_turn_and_a_policy_that_adapts(head):
    for speculation in (IN_TURN, SpeculationConfig(draft_timeout_s=30.0)):
        for place in places(head).values():
            async with system(speculation=speculation, **place) as served:
                await check_tokens((await streams(served, "coupled"))[0])


async def test_a_head_beside_a_draft(head):
    """Both guess into one tree: the head where the draft, whose chains end at a low chance, has no guess.

    In turn, so that every run verifies the same nodes.
    """
    both = replace(IN_TURN, policy="confidence", guessers=("draft", "head"))
    async with system(speculation=both, targets={"head": str(head)}, is_patient=True) as served:
        tokens, sources = await streams(served, "greedy", is_in_turn=True)
    await check_tokens(tokens)
    assert {source.name for source in sources} == {"draft", "head"}


EAGLE = {
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


@pytest.fixture(scope="module")
def eagle_head(tmp_path_factory):
    """A random EAGLE-3 head in the published format, for the demo target."""
    import json

    sizes = json.loads((DEMO / "target/config.json").read_text())
    shape = {"hidden_size": sizes["hidden_size"], "vocab_size": sizes["vocab_size"], "draft_vocab_size": 200}
    return eagle.head_at(tmp_path_factory.mktemp("eagle"), num_tokens=200, **{**EAGLE, **shape})[0]


def eagle_places(head):
    return {
        "target": {"draft": None, "targets": {"head": head}},
        "draft": {"draft": DEMO / "target", "drafts": {"head": head}, "targets": {"feature_layers": (0, 1, 2)}},
    }


def other_kind_at(path, kind):
    """A random head for the demo target, and a function of its places."""
    import json

    sizes = json.loads((DEMO / "target/config.json").read_text())
    shape = {"hidden_size": sizes["hidden_size"], "vocab_size": sizes["vocab_size"]}
    if kind == "EAGLE-1":
        config = {**eagle.FIRST_CONFIG, **EAGLE, **shape}
        del config["eagle_aux_hidden_state_layer_ids"]
        return eagle.write(path, config, eagle.first_tensors_of(config), "pytorch_model.bin"), places
    config = {**eagle.CONFIG, **EAGLE, **shape, "draft_vocab_size": 200, "mask_token_id": 1}
    tensors = eagle.tensors_of(config, num_tokens=200)
    tensors["mask_hidden"] = tensors["fc.weight"][:1].clone()
    return eagle.write(path, config, tensors), eagle_places


@pytest.mark.parametrize("kind", ["EAGLE-1", "P-EAGLE"])
async def test_other_kinds_of_eagle_change_no_token(tmp_path, kind):
    head, places_of = other_kind_at(tmp_path, kind)
    for place in places_of(head):
        await check_random_head(TREE, place, places_of(head), "greedy", "coupled")


@pytest.mark.parametrize("place", ["target", "draft"])
async def test_an_eagle_head_changes_no_token(eagle_head, place):
    await check_random_head(TREE, place, eagle_places(eagle_head))
    await check_random_head(IN_TURN, place, eagle_places(eagle_head), "coupled")


async def check_random_head(speculation, place, where, *names):
    """Its guesses are mostly wrong: each is verified all the same."""
    source = "head" if place == "target" else "draft"
    async with system(speculation=replace(speculation, guessers=(source,)), is_patient=True, **where[place]) as served:
        tokens, sources = await streams(served, *names)
        await served.check_nothing_is_held()
    await check_tokens(tokens)
    assert {each.name for each in sources} == {source}
    assert all(each.num_drafted_tokens > 0 and each.num_failures == 0 for each in sources)


async def test_an_eagle_head_that_pauses_goes_on_after_the_gap(eagle_head):
    """The adaptive policy asks for no features while it decodes plainly, and this head loses by every measure."""
    adaptive = SpeculationConfig(guessers=("draft",), draft_timeout_s=30.0)
    async with system(speculation=adaptive, **eagle_places(eagle_head)["draft"]) as served:
        for _ in range(3):
            await check_tokens((await streams(served, "coupled"))[0])
        await served.check_nothing_is_held()


class CountsMissing:
    """A target's port, and how often it answered that it has lost a text."""

    def __init__(self, port):
        self._port, self.num_missing = port, 0

    async def exchange(self, batch, take):
        def counted(reply):
            self.num_missing += isinstance(reply, Missing)
            take(reply)

        await self._port.exchange(batch, counted)

    async def release(self, sessions):
        await self._port.release(sessions)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["target", "draft"])
async def test_a_target_that_loses_texts_for_lack_of_memory_changes_no_token(eagle_head, place):
    """The streams outgrow its KV. What is preempted is computed again, and with it the features that the head reads."""
    sampling, _ = SAMPLINGS["coupled"]
    plain = (await plain_outputs())["coupled"]
    where = eagle_places(eagle_head)[place]
    targets = {**where["targets"], "kv_cache_tokens": 96, "block_tokens": 4}
    guessers = ("head",) if place == "target" else ("draft",)
    async with system(speculation=replace(TREE, guessers=guessers), **{**where, "targets": targets}) as served:
        served.leases.ports["target"] = port = CountsMissing(served.leases.ports["target"])
        prompts = map(served.tokenizer.encode, PROMPTS)
        assert await served.all_tokens(request(each, NUM_TOKENS, sampling=sampling) for each in prompts) == plain
        assert port.num_missing
        await served.check_nothing_is_held()


@pytest.mark.parametrize("kind", ["blockwise", "eagle"])
async def test_a_new_head_goes_on_where_another_stopped(head, eagle_head, kind):
    sampling, _ = SAMPLINGS["coupled"]
    plain = (await plain_outputs())["coupled"]
    place = (places(head) if kind == "blockwise" else eagle_places(eagle_head))["draft"]
    async with system(speculation=replace(TREE, guessers=("draft",)), **place) as served:
        asked = request(served.tokenizer.encode(PROMPTS[0]), NUM_TOKENS, sampling=sampling)
        tokens, has_restarted = [], False
        async for chunk in served.service.generate(asked):
            tokens += chunk.token_ids
            if not has_restarted and len(tokens) >= 8:
                has_restarted = True
                config = served.leases.engines["draft"]._config
                await served.leases.replace_engine("draft", DraftEngine.load(config, 9, 64, lambda _: None))
        assert tokens == plain[0]
        await served.check_nothing_is_held()


@pytest.fixture(scope="module")
def trained_head(tmp_path_factory):
    """An EAGLE-3 head for the demo target, trained for a few steps on a module of the standard library."""
    import inspect
    import textwrap

    from workers.training import HeadJob, HeadPlan, TrainingText, Watcher, make_head

    folder, tokenizer = tmp_path_factory.mktemp("trained"), Tokenizer.from_directory(DEMO / "target")
    ids = list(tokenizer.encode(inspect.getsource(textwrap)))[:2048]
    texts = [TrainingText(ids[start : start + 128], [(0, 128)]) for start in range(0, len(ids), 128)]
    plan = HeadPlan(num_steps=10, unrolled=2, length=256, batch=1)
    target = EngineConfig(str(DEMO / "target"))
    job = HeadJob(target=target, texts=texts, plan=plan, num_draft_tokens=1024, work=folder / "work")
    make_head(job, folder / "head", "", Watcher())
    return str(folder / "head")


async def test_a_trained_head_is_served_and_changes_no_token(trained_head):
    speculation = replace(TREE, guessers=("head",))
    async with system(draft=None, targets={"head": trained_head}, speculation=speculation) as served:
        tokens, sources = await streams(served)
        await served.check_nothing_is_held()
    await check_tokens(tokens)
    assert all(source.num_drafted_tokens > 0 for source in sources)
