"""A beam search as a state machine without I/O: events in, commands out.

The beams are branches of one tree: the tokens that all live beams share are the session's text, and what follows them
is the block that the target scores. A beam that ends or is dropped leaves the next block; the target keeps the KV of
the others, so that nothing is reordered or computed again. The outputs are sent at the end, since until then any of
them may be dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.beams import Beam, Beams, EndedBeam
from core.errors import InvalidRequest, OutriderError, Unavailable, UnsoundScores
from core.records import (
    Adapter,
    BeamSearch,
    Call,
    CallTrace,
    Chunk,
    FinishReason,
    GenerationRequest,
    Likeliest,
    Missing,
    Refused,
    SequenceSpec,
    TokenLogprobs,
    Usage,
    Verdict,
    is_sound,
)
from core.speculation import DRAFT, ROOT
from core.text import TokenLog
from orchestrator.session import messages as m
from orchestrator.session.beams.beam_drafts import BeamDrafts, usual_depth
from orchestrator.session.beams.beam_tree import beam_tree
from orchestrator.session.beams.pace import Pace, SearchPace
from orchestrator.session.engine_view import SessionText
from orchestrator.session.output import Output
from orchestrator.session.pair import Pair
from orchestrator.session.recorder import Recorder
from orchestrator.session.sourced_block import NO_BLOCK
from orchestrator.session.states import Target
from orchestrator.session.target_side import TargetSide
from orchestrator.session.verdicts import error_of
from orchestrator.text import IncrementalDetokenizer, Tokenizer

ALWAYS = ("static", "static_tree")
"""Policies by which each round is drafted for. By all others it is so while that is quicker, by measurement."""
DRAFT_PATIENCE = 4
"""Multiple of `draft_timeout_s` that a round waits for a draft: it grows below several beams, pass after pass."""


class BeamSession:
    """The life of one beam search, with the events and commands of a `Session`."""

    def __init__(
        self,
        request: GenerationRequest,
        search: BeamSearch,
        pair: Pair,
        tokenizer: Tokenizer,
        session_id: str,
        pace: Pace,
    ) -> None:
        """`pace`: that of all searches of this width."""
        self.id = session_id
        self._request = request
        self._search = search
        self._pair = pair
        self._tokenizer = tokenizer
        self._log = TokenLog(request.prompt)
        eos = frozenset() if request.ignore_eos else frozenset(pair.target.eos_token_ids)
        ending_ids = eos | request.stop_token_ids
        self._beams = Beams(search, ending_ids, request.max_tokens, _num_forced(request, pair))
        self._tops: dict[tuple[int, ...], Likeliest] = {}
        """The likeliest tokens after each extended output, by its tokens; kept if log probabilities are requested."""
        num_likeliest = max(Beams.num_likeliest(search, len(ending_ids)), request.num_logprobs or 0)
        spec = replace(SequenceSpec.of(request), num_likeliest=num_likeliest)
        self._target = TargetSide(SessionText(session_id, self._log, spec), pair.target.vocab_size)
        numbers = _draft_numbers(request, search, pair)
        self._recorder = Recorder(is_traced=request.wants_trace, is_explained=request.wants_explanation)
        self.stats = self._recorder.stats
        asked = request.prompt, SequenceSpec.of(request)
        self._drafts = BeamDrafts(session_id, *asked, numbers, pair.target.vocab_size, self._recorder)
        most = pair.speculation.max_draft_tokens
        self._max_depth = most if request.max_draft_tokens is None else min(most, request.max_draft_tokens)
        self._ending_ids = ending_ids
        is_always_drafted = (request.policy or pair.speculation.policy) in ALWAYS
        self._pace = SearchPace(pace, is_always_drafted=is_always_drafted)
        self._is_drafted = False
        """Whether the awaited scores are those of a round with drafts."""
        self._nodes: dict[tuple[int, ...], int] = {(): ROOT}
        """Node of the block of each live beam and guess."""
        self._num_guesses = 0
        """Number of nodes of the block below the beams."""
        self._num_cached: int | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self._target} {self._log}>"

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt, then the tokens that all live beams share."""
        return self._log.tokens

    @property
    def adapter(self) -> Adapter | None:
        return self._request.adapter

    @property
    def is_closed(self) -> bool:
        return self._target.state is Target.CLOSED

    def start(self, now_s: float = 0.0) -> list[m.Command]:
        self._recorder.started(now_s)
        return [m.LeaseTarget(), *self._drafts.begin()]

    def handle(self, event: m.Event) -> list[m.Command]:
        """Return the commands that follow from `event`; none once the session is closed."""
        if self.is_closed:
            return []
        match event:
            case m.TargetLeased():
                return [self._target.leased(event.name, event.epoch)]
            case m.TargetReplied():
                return self._on_target_replied(event)
            case m.TargetLost() if self._target.is_leased(event.epoch):
                return self._lose_target(event.reason, is_failure=not event.is_planned)
            case m.Abandoned():
                return self._fail(event.error)
            case m.TargetLost():
                return []
            case _:
                return [*self._drafts.handle(event), *self._score_if_ready()]

    def break_off(self) -> None:
        """Nothing is shared with other sessions."""

    # The scores of a block

    def _on_target_replied(self, event: m.TargetReplied) -> list[m.Command]:
        reply = event.reply
        if not self._target.awaits(reply.stamp):
            self._recorder.reply_was_stale()
            return []
        match reply:
            case Verdict():
                return self._on_scores(reply, event)
            case Missing():
                again = self._target.resend(reply)
                return [again] if again is not None else self._lose_target("it does not keep what it is sent")
            case Refused():
                return self._fail(error_of(reply))

    def _on_scores(self, verdict: Verdict, event: m.TargetReplied) -> list[m.Command]:
        if (problem := self._target.scored(verdict)) is not None:
            return self._lose_target(problem)
        if self._num_cached is None:
            self._num_cached = min(verdict.num_cached, len(self._request.prompt))
        scored = {text: verdict.likeliest[1 + node] for text, node in self._nodes.items()}
        num_steps, num_used = self._advance({text: found for text, found in scored.items() if is_sound(found)})
        times = event.sent_s, event.received_s
        call = CallTrace(Call.VERIFY, *times, self._num_guesses, num_used, verdict.timing)
        self._recorder.beams_extended(num_steps, len(self._beams.live), len(self._beams.ended), call)
        self._pace.round_ended(event.received_s, num_steps, is_drafted=self._is_drafted)
        if self._beams.is_done:
            return [*self._last_chunks(), *self._close()]
        if not all(is_sound(scored.get(text, ())) for text in self._live_texts):
            return self._fail(UnsoundScores("a beam's scores are NaN or infinite"))
        return self._draft() or [self._score()]

    @property
    def _live_texts(self) -> list[tuple[int, ...]]:
        return [beam.tokens for beam in self._beams.live]

    def _advance(self, scored: dict[tuple[int, ...], Likeliest]) -> tuple[int, int]:
        """Extend the beams for as long as all of them have scores: after a block with right guesses several times.
        A beam that no token may follow is dropped. Return how often, and the number of right guesses."""
        num_steps = num_used = 0
        while not self._beams.is_done and scored.keys() >= set(self._live_texts):
            texts = self._live_texts
            self._beams.step([scored[text] for text in texts])
            self._tops.update((text, scored[text]) for text in texts if self._request.num_logprobs is not None)
            num_used += len(texts) if num_steps else 0
            num_steps += 1
        return num_steps, num_used

    @property
    def _num_tokens_left(self) -> int:
        """Number of tokens that the beams may still get."""
        return self._request.max_tokens - len(self._beams.live[0].tokens)

    def _draft(self) -> list[m.Command]:
        """Let the draft guess below the beams; nothing if that is not worth its time."""
        usual = usual_depth(self._search.width) if self._request.max_draft_tokens is None else self._max_depth
        depth = min(usual, self._max_depth, self._num_tokens_left - 1)
        if depth < 1 or not (self._drafts.has_lease and self._pace.is_drafting):
            return []
        num_rows, speculation = self._search.width, self._pair.speculation
        commands = self._drafts.grow(self._beams.live, depth, num_rows, DRAFT_PATIENCE * speculation.draft_timeout_s)
        if commands:
            self._target.wait()
        return commands

    def _score_if_ready(self) -> list[m.Command]:
        is_waiting = self._target.state is Target.AWAITING_BLOCK
        return [self._score()] if is_waiting and not self._drafts.is_growing else []

    def _guesses(self) -> list[tuple[int, ...]]:
        """Outputs below the live beams to score ahead, none of them beyond its end."""
        if self._target.state is not Target.AWAITING_BLOCK:
            return []
        room = self._pair.target.kv_cache_tokens - len(self._log) - sum(map(len, self._live_texts))
        found = self._drafts.guesses(self._beams.live, max(0, min(room, self._pair.speculation.max_block_tokens)))
        size = len(self._beams.live[0].tokens)
        return [each for each in found if self._ending_ids.isdisjoint(each[size:])]

    def _score(self) -> m.Command:
        """Send the live beams, and the draft's guesses below them, for their scores."""
        shared = self._beams.num_shared
        first = self._beams.live[0].tokens
        self._log.extend([*self._request.prompt, *first[:shared]][len(self._log) :])
        self._nodes, tree = beam_tree(self._live_texts, shared)
        self._is_drafted = self._target.state is Target.AWAITING_BLOCK
        if guesses := self._guesses():
            num_nodes = len(tree)
            self._nodes, tree = beam_tree([*self._live_texts, *guesses], shared)
            self._num_guesses = len(tree) - num_nodes
        else:
            self._num_guesses = 0
        return self._target.verify(replace(NO_BLOCK, tree=tree, sources=("",) * len(tree)))

    # The target's lease

    def _lose_target(self, reason: str, *, is_failure: bool = True) -> list[m.Command]:
        self._recorder.target_lost(reason, is_failure=is_failure)
        self._pace.target_lost()
        self._target.num_losses += is_failure
        if self._target.num_losses > self._pair.limits.max_target_retries:
            return self._fail(Unavailable(f"the target failed {self._target.num_losses} times in a row: {reason}"))
        return self._target.lease_another()

    # The end

    def _last_chunks(self) -> list[Chunk]:
        """One chunk for each output. The first has the statistics."""
        outputs = self._beams.outputs
        chunks = [replace(self._chunk_of(each), output=number) for number, each in enumerate(outputs)]
        for number in range(len(outputs), self._search.num_outputs):
            problem = InvalidRequest("n", f"the constraints allow only {len(outputs)} outputs")
            usage = Usage(len(self._request.prompt), 0, self._num_cached or 0)
            chunks.append(Chunk("", (), (), usage, finish_reason=FinishReason.LENGTH, problem=problem, output=number))
        return [self._recorder.add_to(chunks[0]), *chunks[1:]]

    def _chunk_of(self, ended: EndedBeam) -> Chunk:
        detokenizer = IncrementalDetokenizer(self._tokenizer, (), self._request.include_stop)
        output = Output(self._request, frozenset(self._pair.target.eos_token_ids), detokenizer)
        output.found_cached(self._num_cached or 0)
        chunk = output.commit(ended.beam.tokens, self._logprobs_of(ended.beam))
        return replace(chunk, score=ended.score, is_guess=(False,) * len(chunk.token_ids))

    def _logprobs_of(self, beam: Beam) -> tuple[TokenLogprobs, ...]:
        if (num_top := self._request.num_logprobs) is None:
            return ()
        tops = (self._tops[beam.tokens[:number]][:num_top] for number in range(len(beam.tokens)))
        return tuple([TokenLogprobs(logprob, top) for logprob, top in zip(beam.logprobs, tops, strict=True)])

    def _fail(self, error: OutriderError) -> list[m.Command]:
        return [m.Fail(error), *self._close()]

    def _close(self) -> list[m.Command]:
        self._target.close()
        return [m.ReleaseTarget(), *self._drafts.close()]


def _draft_numbers(request: GenerationRequest, search: BeamSearch, pair: Pair) -> Sequence[int]:
    """Numbers of the leases on the first draft: one for each beam. None if nothing is drafted; a head is not asked."""
    draft, speculation = pair.drafts[0], pair.speculation
    sources = request.guessers or speculation.guessers
    may_draft = request.max_draft_tokens != 0 and speculation.max_draft_tokens > 0 and DRAFT in sources
    if draft is None or draft.feature_width or not may_draft:
        return ()
    return range(0, search.width * len(pair.drafts), len(pair.drafts))


def _num_forced(request: GenerationRequest, pair: Pair) -> int:
    """Number of tokens of the prompt that transformers counts as output: those forced after a decoder's start token."""
    start = pair.target.decoder_start
    is_bare = bool(start) and request.prompt[request.num_source :] == start
    return len(start) - 1 if is_bare else 0
