"""Engines without a model, behind the real service: passes take the time of a law, and agreement is as recorded.

Serve, links, orchestrator and gRPC are real; in the engines' processes, simulated engines run on a real clock. This
shows what the service adds on hardware that this machine does not have, without models that compete for its processors.
The simulated draft competes a little: computing its candidates for 64 nodes takes one or two milliseconds, which count
as part of its next pass if that follows at once. `bench step` measures what a real engine's step adds to its pass.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from core.config import EngineConfig
from core.costs import PASS_LAWS
from core.errors import WorkerLost
from core.records import EngineStats, Findings, ModelInfo
from deploy.app import Engines
from deploy.engines import DraftActor, EngineActor, TargetActor
from simulation.engines import EngineLaw, SimDraft, SimTarget, Text, TraceLaw
from simulation.rig import model_info

if TYPE_CHECKING:
    from workers.engine import EngineLoop, Receiver

logger = logging.getLogger(__name__)

VOCAB_SIZE = 4096
"""Vocabulary of the demo pair, whose tokenizer the service uses."""
MAX_STEP_TOKENS = 2048


class RecordedLoop:
    """Runs a simulated engine on a thread of its own, like `workers.engine.thread.EngineLoop` for a real engine."""

    def __init__(self, engine: SimTarget | SimDraft, info: ModelInfo) -> None:
        self._engine = engine
        self._info = info
        # select waits exactly as long as requested; epoll rounds to whole milliseconds.
        self._loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: dict[Receiver, list[Any]] = {}
        """Replies of the pass that has just ended; they are sent together."""
        threading.Thread(target=self._loop.run_forever, name="engine", daemon=True).start()

    def post(self, batch: Sequence[Any], receiver: Receiver) -> None:
        self._loop.call_soon_threadsafe(self._take, batch, receiver)

    async def release(self, sessions: Sequence[str]) -> None:
        self._loop.call_soon_threadsafe(self._engine.release, sessions)

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        """Answer a question about the engine. It is asked of this object, because a simulated engine has no KV."""
        return question(self)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def stats(self) -> EngineStats:
        """Statistics, without figures of the KV."""
        engine = self._engine
        return EngineStats(
            len(engine.sessions),
            0,
            0,
            1,
            1,
            0,
            0,
            engine.num_passes,
            engine.num_rows,
            0,
            0,
            0,
            0,
            engine.busy_s,
            engine.busy_s,
        )

    # On the engine's thread

    def _take(self, batch: Sequence[Any], receiver: Receiver) -> None:
        task = self._loop.create_task(self._answer(batch, receiver))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, batch: Sequence[Any], receiver: Receiver) -> None:
        try:
            await self._engine.exchange(batch, lambda reply: self._say(reply, receiver))
        except WorkerLost as lost:
            receiver.lose(lost)
        except Exception as error:
            logger.exception("a simulated engine failed")
            receiver.lose(WorkerLost(f"the engine failed: {error}"))

    def _say(self, reply: Any, receiver: Receiver) -> None:
        if receiver not in self._ready:
            self._ready[receiver] = []
            self._loop.call_soon(lambda: receiver.take(self._ready.pop(receiver)))
        self._ready[receiver].append(reply)


class _Recorded(EngineActor[Any, Any]):
    """Common part of target and draft. `paced_as` names the law of their passes."""

    temperature: ClassVar[float]
    """Temperature at which agreement was recorded."""

    async def load(self, meeting: object = None, known: Findings | None = None) -> tuple[ModelInfo, Findings]:  # noqa: ARG002
        self._bind_links()
        from workers.runtime import this_machine  # imports torch: only in the engine's process, as in real engines

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
    """A target that takes time and emits the recorded text."""

    def _simulated(self, text: Text, law: EngineLaw) -> SimTarget:
        return SimTarget("recorded target", self._epoch, text, law)


class RecordedDraft(_Recorded, DraftActor):
    """A draft that agrees with the target as recorded."""

    def _simulated(self, text: Text, law: EngineLaw) -> SimDraft:
        return SimDraft("recorded draft", self._epoch, text, law)


class GreedyTarget(RecordedTarget):
    temperature = 0.0


class GreedyDraft(RecordedDraft):
    temperature = 0.0


class SampledTarget(RecordedTarget):
    temperature = 1.0


class SampledDraft(RecordedDraft):
    temperature = 1.0


RECORDED = {0.0: Engines(GreedyTarget, GreedyDraft), 1.0: Engines(SampledTarget, SampledDraft)}
"""Engines by temperature."""
