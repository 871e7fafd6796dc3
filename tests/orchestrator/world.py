"""A small world around one session: it carries commands out with fake engines, in whatever order it is told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from core.config import Limits, SpeculationConfig
from core.errors import OutriderError
from core.records import Chunk, DraftRequest, DraftUpdate, GenerationRequest, VerifyRequest
from core.speculation.growth import NewNodes
from core.speculation.token_tree import ROOT
from orchestrator.guessers import Guessers
from orchestrator.session import messages as m
from orchestrator.session.pair import Pair
from orchestrator.session.session import Session
from orchestrator.text.detokenize import IncrementalDetokenizer
from tests.orchestrator.fakes import FakeDraftEngine, FakePolicy, FakeTargetEngine, model_info


class World:
    """Holds what has been asked and not yet been answered; `deliver` answers one of it."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer,
        *,
        gamma=4,
        with_draft=True,
        limits=None,
        guessers=("draft",),
        shared=None,
        policies=None,
    ) -> None:
        """`shared`: the guessers of the orchestrator, for sessions that have them in common; so `policies`."""
        pair = Pair(
            model_info(),
            (model_info("draft") if with_draft else None,),
            SpeculationConfig(max_draft_tokens=gamma, guessers=guessers),
            limits or Limits(),
            shared or Guessers(),
        )
        detokenizer = IncrementalDetokenizer(tokenizer, request.stop, request.include_stop)
        asked = request.max_draft_tokens
        fixed = FakePolicy(gamma if asked is None else min(asked, gamma))
        self.policy = fixed if policies is None else policies.policy(request)
        self.session = Session(request, pair, self.policy, detokenizer, "s")
        self.target = FakeTargetEngine(epoch=1)
        self.draft = FakeDraftEngine(epoch=1)
        self.waiting: list[Callable[[], m.Event]] = []
        self.chunks: list[Chunk] = []
        self.error: OutriderError | None = None
        self.sent: list[m.Command] = []
        self.num_target_leases = self.num_draft_leases = 0

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def last_to_an_engine(self) -> m.Command:
        """The last command that the client had nothing to do with."""
        return next(command for command in reversed(self.sent) if not isinstance(command, Chunk))

    def start(self) -> World:
        self.obey(self.session.start())
        return self

    def obey(self, commands: list[m.Command]) -> None:
        for command in commands:
            assert not self.is_over or isinstance(command, m.ReleaseTarget | m.ReleaseDraft), command
            self.sent.append(command)
            self._obey(command)

    @property
    def is_over(self) -> bool:
        return self.error is not None or bool(self.chunks and self.chunks[-1].finish_reason)

    def _obey(self, command: m.Command) -> None:
        match command:
            case m.LeaseTarget():
                self.waiting.append(self._lease_target)
            case m.LeaseDraft():
                self.waiting.append(self._lease_draft)
            case VerifyRequest() as request:
                self.waiting.append(lambda: m.TargetReplied(self.target.verify(request)))
            case DraftRequest() as request:
                self.waiting.append(lambda: m.DraftReplied(self.draft.draft(request)))
            case Chunk() as chunk:
                self.chunks.append(chunk)
            case m.Fail(error):
                self.error = error
            case m.ReleaseTarget():
                self.num_target_leases = 0
            case m.ReleaseDraft():
                self.num_draft_leases = 0

    def _lease_target(self) -> m.Event:
        self.num_target_leases += 1
        return m.TargetLeased("s", self.target.epoch)

    def _lease_draft(self) -> m.Event:
        self.num_draft_leases += 1
        return m.DraftLeased("s", self.draft.epoch)

    def handle(self, event: m.Event) -> None:
        self.obey(self.session.handle(event))

    def deliver(self, index: int = 0) -> m.Event:
        event = self.waiting.pop(index)()
        self.handle(event)
        return event

    def run(self) -> World:
        while self.waiting:
            self.deliver()
        return self


class FaultyWorld(World):
    """Answers in random order, and sometimes twice, late, never, corrupt, or from an engine that has just restarted."""

    def __init__(self, seed: int, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.random = Random(seed)
        self.echoes: list[m.Event] = []

    def run(self) -> FaultyWorld:
        num_faults = 0
        while self.waiting and not self.is_over:
            if num_faults < 40 and self.random.random() < 0.3:
                num_faults += 1
                self.random.choice(self.faults)(self)
            else:
                self.echoes.append(self.deliver(self.random.randrange(len(self.waiting))))
        return self

    def repeat(self) -> None:
        if self.echoes:
            self.handle(
                self.random.choice([e for e in self.echoes if "Leased" not in type(e).__name__] or [m.DraftLost(-1)])
            )

    def be_late(self) -> None:
        stamps = [command.stamp for command in self.sent if isinstance(command, DraftRequest)]
        if stamps:
            self.handle(m.DraftLate(stamps[-1]))

    def corrupt_the_draft(self) -> None:
        asked = [command for command in self.sent if isinstance(command, DraftRequest)]
        if asked:
            self.handle(m.DraftReplied(nonsense(self.random, asked[-1])))

    def forget_kv(self) -> None:
        self.random.choice([self.target, self.draft]).forget("s")

    def kill_target(self) -> None:
        if self.num_target_leases:
            epoch, self.target = self.target.epoch, type(self.target)(self.target.epoch + 1)
            self._drop(VerifyRequest)
            self.handle(m.TargetLost(epoch, "killed"))

    def kill_draft(self) -> None:
        if self.num_draft_leases:
            epoch, self.draft = self.draft.epoch, type(self.draft)(self.draft.epoch + 1)
            self._drop(DraftRequest)
            self.handle(m.DraftLost(epoch))

    def _drop(self, kind: type[VerifyRequest] | type[DraftRequest]) -> None:
        """Messages on their way to a dead engine are lost with it."""
        name = {VerifyRequest: "TargetReplied", DraftRequest: "DraftReplied"}[kind]
        self.waiting = [answer for answer in self.waiting if name not in answer.__code__.co_names]

    faults = (repeat, be_late, corrupt_the_draft, forget_kv, kill_target, kill_draft)


def nonsense(random: Random, asked: DraftRequest) -> DraftUpdate:
    """An answer to `asked` that no sound draft gives."""
    sound = NewNodes(0, (ROOT,), (5,), (0,), (0.5,), (0.5,))
    answer = DraftUpdate(asked.stamp, sound, asked.num_committed, is_over=True)
    return random.choice(
        [
            replace(answer, new_nodes=replace(sound, tokens=(10_000,))),
            replace(answer, new_nodes=replace(sound, tokens=(-7,))),
            replace(answer, new_nodes=NewNodes(60, (ROOT,), (5,), (0,), (0.5,), (0.5,))),
            replace(answer, held=10**6),
            replace(answer, held=-1),
        ]
    )


def unlimited() -> Limits:
    return replace(Limits(), max_target_retries=1000)
