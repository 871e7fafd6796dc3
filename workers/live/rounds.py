"""Rounds of learning: train on the buffer, hand over a better draft, and take it back if acceptance falls.

Knows the buffer, the learner and the versions; must not know what serves them. A draft that is being judged is also
on disk, so a new process can take it back. Its first round begins with all texts of the buffer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors import SafetensorError

from core.errors import StartupError, first_line
from workers.live.buffer import KeptText, files_after, read_kept
from workers.live.learner import Agreement, Learner, LearningPlan, agreement, load_draft, without_hits
from workers.live.versions import Versions

HELD_OUT = 8
"""One text in so many is never trained on."""
NUM_ASIDE = 64
"""Number of held-out texts that are kept from earlier rounds, to see what a draft forgets."""
TOKENS_A_GUESS = 20
"""Tokens after which a draft is judged by fewer guesses: one that guesses too badly to be asked."""
MIN_GAIN = 0.001
"""Nats a token that a new draft's loss must fall by: less is not worth the seconds without a draft."""
MAX_LOST = 0.01
"""Share of right first guesses that it may lose, since the loss is that of missed places alone."""
MAX_FORGOTTEN = 0.05
"""The same on texts of earlier rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTerms:
    """When a round begins, and how a new draft is judged in service."""

    every_tokens: int = 4000
    """New tokens of the target for a round."""
    judge_guesses: int = 5000
    """Guesses that were accepted or rejected, before and after the new draft is served, to compare."""
    tolerance: float = 0.05
    """Acceptance that may be lost by chance or by other traffic."""
    settle_s: float = 60.0
    """Seconds in which replicas load the draft, and streams end that the old one drafted for."""


@dataclass(slots=True)
class _Judged:
    """A new draft in service that is not yet trusted."""

    version: Path
    before: Path
    acceptance: float | None
    """With the draft before; None if too little is known."""
    settled_s: float | None = None
    """None until the first call of a new process."""
    since: str | None = None
    """The last file that is not counted; None until it is settled."""

    def write(self, file: Path) -> None:
        """Raises: OSError."""
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(replace(self, settled_s=None)), default=str), encoding="utf-8")
        partial.replace(file)

    @classmethod
    def read(cls, file: Path) -> _Judged | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            given = json.loads(file.read_text(encoding="utf-8"))
            return cls(Path(given["version"]), Path(given["before"]), given["acceptance"], None, given["since"])
        return None


class LearningRounds:
    """The life of one draft. Call `tick` every few seconds; it returns what there is to say."""

    def __init__(
        self,
        buffer: Path,
        versions: Versions,
        plan: LearningPlan,
        terms: RoundTerms,
        earlier: Sequence[Path] = (),
        device: str = "cpu",
    ) -> None:
        """`earlier`: drafts that guess beside this one, so that it learns what they miss (boosting)."""
        self._buffer, self._versions, self._plan, self._terms = buffer, versions, plan, terms
        self._earlier, self._device = earlier, device
        self._seen = ""
        """The last file of the last round."""
        self._aside: list[KeptText] = []
        self._judged = _Judged.read(versions.state)
        self.num_rounds = 0
        """Number of rounds that are over."""

    def tick(self, now_s: float) -> str | None:
        try:
            if self._judged is not None:
                return self._judge(self._judged, now_s)
            new = read_kept(files_after(self._buffer, self._seen))
            if sum(text.num_chosen for text in new) < self._terms.every_tokens:
                return None
            return self._round(now_s)
        except (StartupError, OSError, RuntimeError, ValueError, SafetensorError) as error:
            self.num_rounds += 1
            return f"no new draft, the old one stays: {first_line(error)}"

    def _round(self, now_s: float) -> str:
        files = files_after(self._buffer)
        self._seen = files[-1].name
        texts = read_kept(files)
        before = self._versions.served
        learner = Learner(before, self._device)
        held_out, taught = (learner.known(each) for each in _split(texts))
        if not held_out or not taught:
            raise StartupError(f"{len(texts)} texts are too few to hold some out")
        for checkpoint in self._earlier:
            earlier = load_draft(checkpoint)
            taught, held_out = without_hits(earlier, taught), without_hits(earlier, held_out)
        learner.train(taught, replace(self._plan, seed=self._plan.seed + self.num_rounds))
        version = self._versions.add(learner.write)
        problem, said = self._compare(before, version, held_out)
        if problem:
            self._versions.drop(version)
            raise StartupError(f"{problem}; {said}")
        if self._versions.served != before:
            self._versions.drop(version)
            raise StartupError(f"the link was switched meanwhile, to {self._versions.served}")
        judged = _Judged(
            version.resolve(), before, self._acceptance(texts, is_judged=False), now_s + self._terms.settle_s
        )
        judged.write(self._versions.state)  # first, for a process that dies after the switch
        self._versions.serve(version)
        self._judged = judged
        return f"{version} is handed over; {said}"

    def _compare(self, before: Path, version: Path, held_out: list[KeptText]) -> tuple[str, str]:
        """Why the new draft must not be used, or "", and the figures. Its weights are measured as stored."""
        models = [load_draft(each).to(self._device) for each in (before, version)]
        old, new = (agreement(model, held_out) for model in models)
        again = {tuple(text.token_ids) for text in held_out}
        aside = [text for text in self._aside if tuple(text.token_ids) not in again]
        was, now = (agreement(model, aside) for model in models)
        self._aside = sorted(aside + held_out, key=lambda text: _drawn(text.token_ids))[:NUM_ASIDE]
        said = f"held out, {_change(old, new)}, at missed places {old.missed_share:.3f} -> {new.missed_share:.3f}"
        is_better = old.loss - new.loss >= MIN_GAIN
        if self._earlier:  # it learns what others miss, and may be right less often alone
            return "" if is_better else "the new one is not better where the others miss", said
        is_better = is_better and new.share >= old.share - MAX_LOST
        if not is_better:  # nor if a figure is not a number
            return "the new one is not better", said
        if now.share < was.share - MAX_FORGOTTEN:
            return f"the new one forgets: earlier texts, {_change(was, now)}", said
        return "", said

    def _acceptance(self, texts: Sequence[KeptText], *, is_judged: bool) -> float | None:
        """Acceptance rate of the last guesses. None if there are none, or too few to judge a draft by."""
        most, accepted, num_guesses, num_tokens = self._terms.judge_guesses, 0, 0, 0
        for text in reversed(texts):
            accepted += text.num_accepted
            num_guesses += text.num_accepted + text.num_rejected
            num_tokens += text.num_chosen
            if num_guesses >= most or num_tokens >= TOKENS_A_GUESS * most:
                return accepted / max(1, num_guesses)
        return None if is_judged or not num_guesses else accepted / num_guesses

    def _judge(self, judged: _Judged, now_s: float) -> str | None:
        if self._versions.served != judged.version:
            self._end_judging()
            return (
                f"the link was switched meanwhile, to {self._versions.served}: it is left, {judged.version} not judged"
            )
        if judged.since is None:
            if judged.settled_s is None:
                judged.settled_s = now_s + self._terms.settle_s
            if now_s >= judged.settled_s:
                judged.since = max((file.name for file in files_after(self._buffer)), default="")
                judged.write(self._versions.state)
            return None
        acceptance = self._acceptance(read_kept(files_after(self._buffer, judged.since)), is_judged=True)
        if acceptance is None:
            return None
        if judged.acceptance is None:
            said = f"acceptance {acceptance:.3f}; the one before made no guesses"
        else:
            said = f"acceptance {judged.acceptance:.3f} -> {acceptance:.3f}"
        if judged.acceptance is not None and acceptance < judged.acceptance - self._terms.tolerance:
            self._versions.serve(judged.before)  # the other is not deleted: replicas may be loading it
            self._end_judging()
            return f"{judged.version} is taken back, {judged.before} is served again: {said}"
        self._end_judging()
        self._versions.drop_old()
        return f"{judged.version} stays: {said}"

    def _end_judging(self) -> None:
        self._judged = None
        self.num_rounds += 1
        self._versions.state.unlink(missing_ok=True)


def _split(texts: Sequence[KeptText]) -> tuple[list[KeptText], list[KeptText]]:
    """Texts that are held out, the same in each round, and those to train on."""
    held_out, taught = list[KeptText](), list[KeptText]()
    for text in texts:
        is_held_out = _drawn(text.token_ids[: text.first]) % HELD_OUT == 0  # all samples of a prompt on one side
        (held_out if is_held_out else taught).append(text)
    return held_out, taught


def _drawn(token_ids: Sequence[int]) -> int:
    """A number that is as good as random, and the same in each round."""
    return zlib.crc32(repr(token_ids).encode())


def _change(before: Agreement, after: Agreement) -> str:
    return (
        f"{after.num_tokens} tokens: loss {before.loss:.3f} -> {after.loss:.3f} nats, "
        f"first guesses right {before.share:.3f} -> {after.share:.3f}"
    )
