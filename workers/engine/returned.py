"""What verdicts carry for heads: features of the committed rows, and guesses of a head in this engine.

Knows judged jobs, hidden states and heads; must not know KV or messages. Nothing here can change a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from core.config import EngineConfig
from core.records import Features, Want
from core.rules import Outcome
from core.speculation import NO_GUESSES, ROOT, Candidates, Guesses
from workers.engine.jobs import VerifyJob
from workers.heads import BlockwiseHead, load_head, read_head, tapped_layers
from workers.model import load
from workers.runtime import ModelRuntime
from workers.sampling import DraftRow, Kind, Row, propose
from workers.step import Readback, upload

MAX_SIBLINGS = 8
"""Number of guesses below the next token. The policy decides how many are worth a row."""

Judged = tuple[VerifyJob, Outcome]


@dataclass(frozen=True, slots=True)
class EngineHead:
    """A head in a target's engine."""

    name: str
    head: BlockwiseHead
    columns: tuple[int, ...]
    """Columns of the engine's features that it reads."""
    q_top_tokens: int = 1


def load_engine_head(config: EngineConfig, runtime: ModelRuntime, progress: Callable[[str], None]) -> EngineHead | None:
    """The head of `config.head`, for the model of this runtime; None without one. Raises: StartupError."""
    if config.head is None:
        return None
    head_config, model = read_head(config.head), runtime.context.model
    head_config.check_target(model.config.hidden_size, model.config.vocab_size)
    progress(f"loading the head {head_config.name}")
    head = load_head(config.head, _output_layer(config, model, progress), model.dtype, torch.device(config.device))
    size, tapped = head_config.hidden_size, tapped_layers(config)
    columns = [size * tapped.index(layer) + column for layer in head_config.feature_layers for column in range(size)]
    return EngineHead(head_config.name, head, tuple(columns))


def _output_layer(config: EngineConfig, model: Any, progress: Callable[[str], None]) -> nn.Module:
    """The model's output layer; of a model over several ranks a whole copy, because the head runs on one."""
    if config.tensor_parallel > 1:
        model = load(replace(config, layers=(0,), tensor_parallel=1, compile=False), progress).model
    output: nn.Module = model.get_output_embeddings()
    return output


def features_of_pass(jobs: Sequence[VerifyJob], rows: Tensor | None) -> PassFeatures | None:
    """`rows` [R, width] are those of the jobs' roots and blocks, in order; None if nothing is tapped."""
    if rows is None:
        return None
    starts = accumulate((1 + len(job.block) for job in jobs), initial=0)
    return PassFeatures(rows, dict(zip(jobs, starts, strict=False)))


@dataclass(frozen=True, slots=True)
class PassFeatures:
    """Features of one pass, and where each job's rows are."""

    rows: Tensor
    """[rows, width]."""
    first: Mapping[VerifyJob, int]
    """Row of each job's root."""

    def committed(self, job: VerifyJob, outcome: Outcome) -> list[int]:
        """Rows of the root and of the accepted nodes."""
        return [self.first[job], *(self.first[job] + 1 + node for node in outcome.path)]


def read_features(
    judged: Sequence[Judged], found: PassFeatures, width: int, readback: Readback
) -> Callable[[], list[Features | None]]:
    """The features that each job wants, the first `width` columns. Call the result after the readback."""
    wanted = [found.committed(job, outcome) if Want.FEATURES in job.request.wants else [] for job, outcome in judged]
    rows = [row for of_job in wanted for row in of_job]
    if not rows or not width:
        return lambda: [None] * len(judged)
    columns = found.rows[upload(rows, found.rows.device), :width]
    read = readback.add_bytes(columns.to(torch.bfloat16))

    def features() -> list[Features | None]:
        data, start, each = read(), 0, list[Features | None]()
        for (job, _), of_job in zip(judged, wanted, strict=True):
            end = start + 2 * width * len(of_job)
            first = job.request.num_committed - 1
            each.append(Features(first, width, data[start:end]) if of_job else None)
            start = end
        return each

    return features


def read_guesses(
    judged: Sequence[Judged], found: PassFeatures, engine_head: EngineHead, readback: Readback
) -> Callable[[], list[Guesses]]:
    """The head's guesses below each job's next token, where they are wanted. Call the result after the readback."""
    wanting = [(job, outcome) for job, outcome in judged if Want.GUESSES in job.request.wants]
    if not wanting:
        return lambda: [NO_GUESSES] * len(judged)
    rows = upload([found.committed(job, outcome)[-1] for job, outcome in wanting], found.rows.device)
    columns = upload(list(engine_head.columns), found.rows.device)
    logits = engine_head.head(found.rows[rows][:, columns])
    read = propose(logits, [_draft_row(job, outcome) for job, outcome in wanting], engine_head.q_top_tokens, readback)

    def guesses() -> list[Guesses]:
        by_job = {job: _siblings(each) for (job, _), each in zip(wanting, read(), strict=True)}
        return [by_job.get(job, NO_GUESSES) for job, _ in judged]

    return guesses


def _draft_row(job: VerifyJob, outcome: Outcome) -> DraftRow:
    """Sampling input of the token after the next one, as the target will draw it."""
    spec, log = job.held.spec, job.held.log.tokens
    path = [*(job.block.tokens[node] for node in outcome.path), outcome.next_token]
    # A rule that needs q gets the likeliest token as a guess without a distribution, like any guesser's.
    sampling = replace(spec.sampling, temperature=0.0) if spec.needs_q else spec.sampling
    seen = [*log, *path] if sampling.reads_tokens else ()
    row = Row(sampling, len(log) + len(path), seen, spec.prompt_len)
    return DraftRow(row, Kind.of(sampling, spec.verification), num_ranks=MAX_SIBLINGS + 1)


def _siblings(candidates: Candidates | None) -> Guesses:
    if candidates is None:  # NaN or infinite: the target's own logits are checked where they count
        return NO_GUESSES
    tokens, shares = candidates.ranked[:MAX_SIBLINGS], candidates.shares[:MAX_SIBLINGS]
    return Guesses((ROOT,) * len(tokens), tokens, shares)
