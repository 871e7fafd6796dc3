"""A head with KV of its own in a target's engine: a draft engine that gets each verdict as a message.

So a head guesses in the same way at both places. Nothing here can change a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from torch import Tensor

from core.config import EngineConfig
from core.records import DraftRequest, DraftUpdate, Features, ModelInfo, SequenceSpec, Stamp, Verification
from core.speculation import NO_GUESSES, ROOT, Guesses, NewNodes, TreeSpec
from workers.engine.draft import DraftEngine
from workers.engine.sequences import HeldSequence
from workers.heads import CommittedRows, EngineHead, HeadWithKV, read_features
from workers.runtime import KVHeadRuntime
from workers.step import Readback

MAX_NODES = 64
"""Number of guesses of a verdict. The policy decides how many are worth a row."""
ROWS_PER_PASS = 8
MIN_PATH_PROB = 0.1
"""The head makes no further pass for guesses whose path probabilities sum to less."""
TAIL = (0.3, 0.15, 0.1)

Extended = tuple[HeldSequence, int]
"""A sequence after a verdict, and the token that follows it."""


class HeadDraft:
    """The sessions of a target's engine, as its head knows them."""

    def __init__(self, runtime: KVHeadRuntime, config: EngineConfig, columns: Sequence[int]) -> None:
        self.warm_up = runtime.warm_up
        self._engine = DraftEngine(runtime, config, epoch=0, q_top_tokens=1)
        self._columns = columns
        self._growth = TreeSpec(
            ROWS_PER_PASS,
            config.head_passes,
            MIN_PATH_PROB,
            tail=TAIL,
            reports_all=True,
            num_passes=config.head_passes,
        )
        self._rounds = count(1)

    @classmethod
    def of(cls, head: EngineHead, info: ModelInfo, config: EngineConfig) -> HeadDraft | None:
        """The head of a target with this `info`; None if it has no KV."""
        if not isinstance(head.head, HeadWithKV):
            return None
        own = replace(config, kv_cache_tokens=info.kv_cache_tokens, share_prefixes=False, paced_as=None)
        return cls(KVHeadRuntime(head.head, info, own), own, head.columns)

    def release(self, sessions: Sequence[str]) -> None:
        self._engine.release(sessions)

    def expire(self) -> None:
        self._engine.expire()

    def read(
        self, features: Tensor, verdicts: Sequence[CommittedRows], readback: Readback
    ) -> Callable[[Sequence[Extended]], list[Guesses]]:
        """Guesses below each verdict that wants them. Call the result after the readback, with the sequences."""
        wanting = [index for index, each in enumerate(verdicts) if each.guess is not None]
        read = read_features(features, [verdicts[index] for index in wanting], self._columns, readback)

        def by_verdict(extended: Sequence[Extended]) -> list[Guesses]:
            found = dict(zip(wanting, self._guess([extended[index] for index in wanting], read()), strict=True))
            return [found.get(index, NO_GUESSES) for index in range(len(verdicts))]

        return by_verdict

    def _guess(self, extended: Sequence[Extended], features: Sequence[Features]) -> list[Guesses]:
        requests = [self._request(*each, known) for each, known in zip(extended, features, strict=True)]
        for request in requests:
            self._engine.add(request)
        updates = {}
        while self._engine.has_work:
            updates.update({reply.stamp: reply for reply in self._engine.step()})
        return [_guesses_of(updates.get(request.stamp)) for request in requests]

    def _request(self, held: HeldSequence, next_token: int, features: Features) -> DraftRequest:
        session, log = held.session, held.log
        base = log.base(self._engine.num_shared(session, log))
        stamp = Stamp(session, self._engine.epoch, next(self._rounds))
        suffix = (*log.since(base.num_tokens), next_token)
        return DraftRequest(stamp, base, suffix, self._growth, _spec_of(held.spec), features)


def _spec_of(spec: SequenceSpec) -> SequenceSpec:
    """How a head samples. Rules that need q get the likeliest tokens as guesses, like any guesser's."""
    sampling = replace(spec.sampling, temperature=0.0) if spec.needs_q else spec.sampling
    return replace(
        spec, sampling=sampling, verification=Verification.COUPLED, grammar=None, adapter=None, num_prompt_logprobs=None
    )


def _guesses_of(reply: object) -> Guesses:
    """The likeliest nodes of an update; none of any other reply."""
    if not isinstance(reply, DraftUpdate):
        return NO_GUESSES
    nodes = reply.new_nodes
    kept = _likeliest(nodes)
    moved = {ROOT: ROOT, **{node: index for index, node in enumerate(kept)}}
    parents, tokens, chances = nodes.parents.tolist(), nodes.tokens.tolist(), nodes.chances.tolist()
    return Guesses(
        tuple(moved[parents[node]] for node in kept),
        tuple(tokens[node] for node in kept),
        tuple(chances[node] for node in kept),
    )


def _likeliest(nodes: NewNodes) -> list[int]:
    """The nodes with the largest path probabilities, parents first."""
    path_prob = list[float]()
    for parent, chance in zip(nodes.parents.tolist(), nodes.chances.tolist(), strict=True):
        path_prob.append(chance * (1.0 if parent == ROOT else path_prob[parent]))
    by_path_prob = sorted(range(len(nodes)), key=lambda node: (-path_prob[node], node))
    return sorted(by_path_prob[:MAX_NODES])
