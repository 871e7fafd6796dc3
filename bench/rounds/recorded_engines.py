"""Engines without a model, behind the real service: their passes take what a law says, and they agree as was recorded.

Serve, links, orchestrator and gRPC are the real ones; in the engines' processes the simulator's engines run on a real
clock. So a benchmark sees what the service adds to hardware that this machine does not have: no model competes for the
processors with what is measured. The simulated draft does, a little: what it says of 64 places takes it a millisecond
or two, which is within the time of its next pass where that follows at once. What a real engine's step adds to its
pass is measured by `bench step`.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, cast

from core.config import EngineConfig
from core.costs import PASS_LAWS
from core.errors import WorkerLost
from core.records import DraftRequest, EngineStats, Findings, ModelInfo
from core.speculation import TreeSpec
from deploy.app import Engines
from deploy.engines import DraftActor, EngineActor, TargetActor
from simulation.engines import EngineLaw, SimDraft, SimTarget, Text, TraceLaw
from simulation.rig import model_info

if TYPE_CHECKING:
    from workers.engine import EngineLoop, Receiver

logger = logging.getLogger(__name__)

VOCAB_SIZE = 4096
"""The demo pair's, whose tokenizer the service has."""
MAX_STEP_TOKENS = 2048


class RecordedLoop:
    """Does for a simulated engine what `workers.engine.thread.EngineLoop` does for a real one: a thread of its own."""

    def __init__(self, engine: SimTarget | SimDraft, info: ModelInfo) -> None:
        self._engine = engine
        self._info = info
        # Whose waits are as long as they are asked to be: those of epoll are whole milliseconds.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: dict[Receiver, list[tuple[int, Any]]] = {}
        """Replies of the pass that has just ended, which go together."""
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()

    def post(self, batch: Sequence[tuple[int, Any]], receiver: Receiver) -> None:
        """As the loop of a real engine does."""
        self._loop.call_soon_threadsafe(self._take, batch, receiver)

    async def submit(self, batch: Sequence[Any]) -> list[Any]:
        """The same."""
        replies: list[Any] = await self._on_thread(self._engine.answer(batch))
        return replies

    async def release(self, sessions: Sequence[str]) -> None:
        """The same."""
        self._loop.call_soon_threadsafe(self._engine.release, sessions)

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        """The same, of what little is asked of an engine without KV."""
        return question(self)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def stats(self) -> EngineStats:
        """With nothing of KV in it."""
        engine = self._engine
        return EngineStats(
            len(engine.sessions),
            0,
            0,
            1,
            1,
            engine.num_passes,
            engine.num_rows,
            0,
            0,
            0,
            0,
            engine.busy_s,
            engine.busy_s,
        )

    async def _on_thread(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return await asyncio.wrap_future(future)

    # On the engine's thread

    def _take(self, batch: Sequence[tuple[int, Any]], receiver: Receiver) -> None:
        for number, request in batch:
            task = self._loop.create_task(self._answer(number, request, receiver))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, request: Any, receiver: Receiver) -> None:
        reply: Any
        try:
            if isinstance(request, DraftRequest) and isinstance(request.growth, TreeSpec):
                reply = await cast("SimDraft", self._engine).grow(request, lambda told: receiver.take([(number, told)]))
            else:
                [reply] = await self._engine.answer([request])
        except WorkerLost as lost:
            receiver.lose(lost)
        except Exception as error:
            logger.exception("a simulated engine failed")
            receiver.lose(WorkerLost(f"the engine failed: {error}"))
        else:
            self._say(number, reply, receiver)

    def _say(self, number: int, reply: Any, receiver: Receiver) -> None:
        if receiver not in self._ready:
            self._ready[receiver] = []
            self._loop.call_soon(lambda: receiver.take(self._ready.pop(receiver)))
        self._ready[receiver].append((number, reply))


class _Recorded(EngineActor[Any, Any]):
    """What both have in common. `paced_as` names the law of their passes."""

    temperature: ClassVar[float]
    """At which agreement was recorded."""

    async def load(self, meeting: object = None, known: Findings | None = None) -> tuple[ModelInfo, Findings]:  # noqa: ARG002
        from workers.runtime import this_machine  # torch: in the engine's process alone, as of real engines

        text = Text(TraceLaw.load(self.temperature), VOCAB_SIZE)
        info = model_info(text)
        loop = RecordedLoop(self._simulated(text, _law(self._config)), info)
        self._loop = cast("EngineLoop[Any, Any]", loop)
        return info, Findings(this_machine(), is_compiled=False, tile_rows=None, step_times_s=())

    @abstractmethod
    def _simulated(self, text: Text, law: EngineLaw) -> SimTarget | SimDraft: ...


def _law(config: EngineConfig) -> EngineLaw:
    assert config.paced_as is not None, "an engine without a model takes its time from a law"
    return EngineLaw(PASS_LAWS[config.paced_as], MAX_STEP_TOKENS)


class RecordedTarget(_Recorded, TargetActor):
    """A target that takes time and says what was recorded."""

    def _simulated(self, text: Text, law: EngineLaw) -> SimTarget:
        return SimTarget("recorded target", self._epoch, text, law)


class RecordedDraft(_Recorded, DraftActor):
    """A draft that agrees with it as was recorded."""

    def _simulated(self, text: Text, law: EngineLaw) -> SimDraft:
        return SimDraft("recorded draft", self._epoch, text, law)


class GreedyTarget(RecordedTarget):
    """At temperature 0."""

    temperature = 0.0


class GreedyDraft(RecordedDraft):
    """At temperature 0."""

    temperature = 0.0


class SampledTarget(RecordedTarget):
    """At temperature 1."""

    temperature = 1.0


class SampledDraft(RecordedDraft):
    """At temperature 1."""

    temperature = 1.0


RECORDED = {0.0: Engines(GreedyTarget, GreedyDraft), 1.0: Engines(SampledTarget, SampledDraft)}
"""By temperature."""
