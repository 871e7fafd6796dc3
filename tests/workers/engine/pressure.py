"""Orchestrators that keep a target busy by hand, with more sessions than its KV has room for; counts, no times.

Each client begins a session as soon as its last one has ended. A session sends its next message when it has a verdict,
one step later, as a message that is on its way while the engine goes on. Messages of decoding sessions share calls as
`orchestrator.dispatch.batcher` makes them: one call is under way, and its replies come together.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from core.config import DECODE_TOKENS
from core.records import Missing, Stamp, Verdict
from tests.workers.engine.driving import Driver

GIVE_UP_STEPS = 20_000


@dataclass(eq=False)
class Client:
    """One session after the other."""

    driver: Driver
    num_prompt: int
    num_missing: int = 0


@dataclass(eq=False)
class Call:
    """Messages that are answered together."""

    clients: list[Client]
    open: set[Stamp]
    replies: dict[Stamp, Any] = field(default_factory=dict)
    is_decoding: bool = True


class Orchestrator:
    """Sends the messages of its clients."""

    def __init__(self, world: World, prompts: deque[list[int]], num_clients: int, name: str) -> None:
        self._world, self._prompts, self._name = world, prompts, name
        self._calls: list[Call] = []
        self._waiting: list[Client] = []
        self._num_begun = 0
        self.outputs: dict[tuple[int, ...], list[int]] = {}
        self.num_missing = 0
        for _ in range(num_clients):
            self._begin()

    @property
    def is_busy(self) -> bool:
        return bool(self._calls or self._waiting)

    def _begin(self) -> None:
        if self._prompts:
            self._num_begun += 1
            prompt = self._prompts.popleft()
            driver = Driver(self._world.engine, prompt, session=f"{self._name} {self._num_begun}")
            self._put(Client(driver, len(prompt)))

    def _put(self, client: Client) -> None:
        if client.driver.held == 0 or len(client.driver.log) - client.driver.held > DECODE_TOKENS:
            self._send([client], is_decoding=False)
        else:
            self._waiting.append(client)

    def send(self) -> None:
        """Send what has gathered, unless a call of decoding sessions is under way."""
        if self._waiting and not any(call.is_decoding for call in self._calls):
            waiting, self._waiting = self._waiting, []
            self._send(waiting, is_decoding=True)

    def _send(self, clients: list[Client], *, is_decoding: bool) -> None:
        stamps = [self._world.post(self, client.driver.verify_request()) for client in clients]
        self._calls.append(Call(clients, set(stamps), dict.fromkeys(stamps), is_decoding))

    def take(self, reply: Any) -> None:
        """A reply, which counts when its call is complete."""
        call = next(call for call in self._calls if reply.stamp in call.open)
        call.open.discard(reply.stamp)
        call.replies[reply.stamp] = reply
        if not call.open:
            self._calls.remove(call)
            for client, each in zip(call.clients, call.replies.values(), strict=True):
                self._answered(client, each)

    def _answered(self, client: Client, reply: Any) -> None:
        driver = client.driver
        driver.held = reply.held
        if isinstance(reply, Missing):
            self.num_missing += 1
            client.num_missing += 1
            assert client.num_missing <= 3, "a real session would leave an engine that keeps nothing"
            self._put(client)
            return
        assert isinstance(reply, Verdict), reply
        client.num_missing = 0
        driver.log.extend([reply.next_token])
        if len(driver.log) == client.num_prompt + self._world.num_output:
            self._world.engine.release([driver.session])
            tokens = list(driver.log.tokens)
            self.outputs[tuple(tokens[: client.num_prompt])] = tokens[client.num_prompt :]
            self._begin()
        else:
            self._put(client)


class World:
    """One engine and its orchestrators."""

    def __init__(self, engine: Any, num_output: int) -> None:
        self.engine = engine
        self.num_output = num_output
        self.rows: list[int] = []
        """Number of rows of each pass; 0 where the engine only waited for a message."""
        self._on_the_way: list[Any] = []
        self._owners: dict[Stamp, Orchestrator] = {}

    def post(self, owner: Orchestrator, request: Any) -> Stamp:
        """Send a message, which arrives one step later."""
        self._owners[request.stamp] = owner
        self._on_the_way.append(request)
        return request.stamp

    def run(self, orchestrators: list[Orchestrator]) -> None:
        """Serve until all sessions have ended."""
        for _ in range(GIVE_UP_STEPS):
            for each in orchestrators:
                each.send()
            if not any(each.is_busy for each in orchestrators):
                return
            coming, self._on_the_way = self._on_the_way, []
            before = self.engine.stats().num_rows
            for reply in self.engine.step():
                self._owners[reply.stamp].take(reply)
            self.engine.check_integrity()
            self.rows.append(self.engine.stats().num_rows - before)
            for request in coming:
                self.engine.add(request)
        raise AssertionError("somebody waits for ever")


@dataclass(frozen=True)
class Pressure:
    """Outcome of a load."""

    num_output: int
    num_recomputed: int
    num_missing: int
    num_preemptions: int
    rows: list[int]
    """Number of rows of each pass."""
    outputs: dict[tuple[int, ...], list[int]]


def prompts_of(num: int, seed: int = 1, low: int = 40, high: int = 120) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(250) for _ in range(random.randrange(low, high))] for _ in range(num)]


def press(
    engine: Any, prompts: list[list[int]], num_output: int, num_clients: int, num_orchestrators: int = 1
) -> Pressure:
    """Serve these prompts by so many clients at a time."""
    world, queue = World(engine, num_output), deque(prompts)
    each = num_clients // num_orchestrators
    orchestrators = [Orchestrator(world, queue, each, f"{n}") for n in range(num_orchestrators)]
    world.run(orchestrators)
    stats = engine.stats()
    num_needed = sum(len(prompt) for prompt in prompts) + len(prompts) * (num_output - 1)
    outputs = {prompt: out for each in orchestrators for prompt, out in each.outputs.items()}
    return Pressure(
        len(prompts) * num_output,
        stats.num_rows - num_needed,
        sum(each.num_missing for each in orchestrators),
        stats.num_preemptions,
        world.rows,
        outputs,
    )
