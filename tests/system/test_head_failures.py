"""Engines with a head, or of its target, die, are swapped and come back while a stream is held at a known round.

No token changes, and the head guesses again. Its vocabulary has the four commonest tokens of the outputs, all of which
it guesses in each round. So some of its guesses are right, whatever its random weights say and however busy the machine
is.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest
from local import DEMO, request, system

from core.config import SpeculationConfig
from core.records import Sampling
from tests import eagle
from workers.engine.draft import DraftEngine
from workers.engine.target import TargetEngine

NUM_TOKENS, LAST, NUM_GUESSABLE = 80, 32, 4
PROMPT = "def parse_args(self, args):\n    "
SAMPLINGS = {"greedy": Sampling(temperature=0.0), "seeded": Sampling(temperature=0.8, seed=17)}
ONE_DEEP = SpeculationConfig(
    policy="static_tree",
    max_draft_tokens=1,
    max_block_tokens=NUM_GUESSABLE,
    draft_timeout_s=30.0,
    draft_retry_s=0.01,
    breaker_rounds=1000,
)
NUM_IN_FLIGHT = 6
"""Tokens that may come of guesses made before: of the block that is held, and of one that was offered after it."""
MAX_WAIT_S = 60.0


def asked(served, drawn, seed=17):
    sampling = SAMPLINGS[drawn]
    if drawn == "seeded":
        sampling = Sampling(temperature=sampling.temperature, seed=seed)
    return request(served.tokenizer.encode(PROMPT), NUM_TOKENS, sampling=sampling)


async def plain_outputs():
    async with system(draft=None) as served:
        ways = [(drawn, seed) for drawn in SAMPLINGS for seed in (17, 18)]
        return {way: await served.tokens(asked(served, *way)) for way in ways}


@pytest.fixture(scope="module")
def plain():
    """Outputs without drafts, by sampling and seed."""
    return asyncio.run(plain_outputs())


@pytest.fixture(scope="module")
def head(plain, tmp_path_factory):
    counts = Counter(token for tokens in plain.values() for token in tokens[-LAST:])
    return eagle.sure_head_at(tmp_path_factory.mktemp("head"), DEMO / "target", commonest(counts))


def commonest(counts):
    return [token for token, _ in counts.most_common(NUM_GUESSABLE)]


def places(head):
    return {
        "head": {"draft": None, "targets": {"head": head}},
        "draft": {"draft": DEMO / "target", "drafts": {"head": head}, "targets": {"feature_layers": (0, 1, 2)}},
    }


def serving(head, place="draft"):
    return system(speculation=replace(ONE_DEEP, guessers=(place,)), **places(head)[place])


class Gate:
    """A target's port that holds all messages after the first ones."""

    def __init__(self, leases, name="target"):
        self._leases, self._name, self._port = leases, name, leases.ports[name]
        self._num_left, self._open, self.is_reached = 0, asyncio.Event(), asyncio.Event()
        leases.ports[name] = self

    def pass_on(self, num_calls):
        """Let this number of messages through, and wait until another has come."""
        self._num_left = num_calls
        self.is_reached.clear()
        self._open.set()
        return self.is_reached.wait()

    def open(self):
        self.pass_on(1_000_000).close()

    async def exchange(self, batch, take):
        while self._num_left <= 0:
            self._open.clear()
            self.is_reached.set()
            await self._open.wait()
        self._num_left -= 1
        await self._port.exchange(batch, take)

    async def release(self, sessions):
        await self._port.release(sessions)


class Reading:
    """A stream that is read to its end in a task."""

    def __init__(self, served, job):
        self.tokens, self.is_guess = [], []
        self.task = asyncio.create_task(self._read(served.service.generate(job)))

    async def _read(self, chunks):
        async for chunk in chunks:
            self.tokens += chunk.token_ids
            self.is_guess += chunk.is_guess

    async def guesses_after(self, num_tokens):
        """The number of accepted guesses that were made after the text had this length."""
        await asyncio.wait_for(self.task, MAX_WAIT_S)
        return sum(self.is_guess[num_tokens + NUM_IN_FLIGHT :])


async def until_it_has_drafted(leases, name):
    """Wait until an engine has made a pass for a session."""
    deadline_s = time.monotonic() + MAX_WAIT_S
    while time.monotonic() < deadline_s:
        if (await leases.loops[name].ask(lambda engine: engine.stats())).num_steps:
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"{name} got no session")


def another(engine, epoch=9):
    """An engine like this one, without its sessions."""
    config = engine._config
    if isinstance(engine, TargetEngine):
        return TargetEngine.load(config, epoch, lambda _: None)
    return DraftEngine.load(config, epoch, 64, lambda _: None)


SLOW = pytest.mark.slow
WAYS = [pytest.param("greedy", marks=SLOW), "seeded"]


@pytest.mark.parametrize("drawn", WAYS)
async def test_a_head_that_was_scaled_to_zero_comes_back_and_guesses_again(plain, head, drawn):
    """It dies in the middle of a stream, which goes on without it; then there is one again."""
    async with serving(head) as served:
        leases, gate = served.leases, Gate(served.leases)
        stream = Reading(served, asked(served, drawn))
        await gate.pass_on(6)
        await until_it_has_drafted(leases, "draft")
        new = another(leases.engines["draft"])
        await leases.kill("draft")
        await gate.pass_on(10)
        leases.add_engine("draft", new)
        await until_it_has_drafted(leases, "draft")
        num_before = len(stream.tokens)
        gate.open()
        assert await stream.guesses_after(num_before) > 0
        assert stream.tokens == plain[drawn, 17]
        await served.check_nothing_is_held()


@pytest.mark.parametrize("drawn", [pytest.param(way, marks=SLOW) for way in SAMPLINGS])
async def test_a_head_that_was_swapped_goes_on_guessing(plain, head, drawn):
    async with serving(head) as served:
        leases, gate = served.leases, Gate(served.leases)
        stream = Reading(served, asked(served, drawn))
        await gate.pass_on(8)
        await leases.replace_engine("draft", another(leases.engines["draft"]))
        await gate.pass_on(4)  # it is told with the next verdict
        await until_it_has_drafted(leases, "draft")
        num_before = len(stream.tokens)
        gate.open()
        assert await stream.guesses_after(num_before) > 0
        assert stream.tokens == plain[drawn, 17]
        await served.check_nothing_is_held()


@pytest.mark.parametrize(
    ("place", "drawn"),
    [("draft", "seeded"), *[pytest.param(*way, marks=SLOW) for way in [("draft", "greedy"), ("head", "greedy")]]],
)
async def test_a_target_that_died_is_asked_for_features_again(plain, head, place, drawn):
    """The next one brings the features of the tokens whose verdict was lost; a head of its own knows them from KV."""
    async with serving(head, place) as served:
        leases, gate = served.leases, Gate(served.leases)
        stream = Reading(served, asked(served, drawn))
        await gate.pass_on(8)
        num_before = len(stream.tokens)
        await leases.replace_engine("target", another(leases.engines["target"]))
        gate.open()
        assert await stream.guesses_after(num_before) > 0
        assert stream.tokens == plain[drawn, 17]
        await served.check_nothing_is_held()


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["target", "draft"])
async def test_several_engines_of_one_kind_with_one_of_the_other(plain, head, shared):
    """Two targets with one head, and one target with two heads: one of the two dies while all streams are held."""
    doubled = "draft" if shared == "target" else "target"
    async with serving(head) as served:
        leases = served.leases
        leases.add_engine(f"{doubled}'", another(leases.engines[doubled]))
        gates = [Gate(leases, name) for name in tuple(leases.engines) if name.startswith("target")]
        ways = [(drawn, seed) for drawn in SAMPLINGS for seed in (17, 18)]
        streams = [Reading(served, asked(served, *way)) for way in ways]
        await asyncio.gather(*[gate.pass_on(12) for gate in gates])
        assert all(leases.num_granted[name] for name in (doubled, f"{doubled}'"))
        num_before = [len(stream.tokens) for stream in streams]
        await leases.kill(f"{doubled}'")
        for gate in gates:
            gate.open()
        num_right = [await stream.guesses_after(num) for stream, num in zip(streams, num_before, strict=True)]
        assert [stream.tokens for stream in streams] == [plain[way] for way in ways]
        assert sum(num_right) > 0
        await served.check_nothing_is_held()
