"""What verdicts carry for heads: features of the committed rows, and guesses of a head in the target's engine.

Knows hidden states and heads; must not know jobs, KV or messages. Nothing here can change a verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import torch
from torch import Tensor, nn

from core.config import EngineConfig
from core.records import Features
from core.speculation import NO_GUESSES, ROOT, Candidates, Guesses
from workers.heads.eagle import EagleHead, load_eagle
from workers.heads.eagle_files import EagleConfig
from workers.heads.files import load_head, read_head, tapped_layers
from workers.heads.state_heads import StateHeads
from workers.model import LoadedModel, load
from workers.sampling import DraftRow, Kind, Row, propose
from workers.step import Readback, upload

MAX_SIBLINGS = 8
"""Number of guesses below one node."""
MAX_GUESSES = 32
"""Number of guesses below the next token. The policy decides how many are worth a row."""


@dataclass(frozen=True, slots=True)
class EngineHead:
    """A head in a target's engine."""

    name: str
    head: StateHeads | EagleHead
    columns: tuple[int, ...]
    """Columns of the engine's features that it reads."""
    vocab_size: int
    """Number of token ids; rows of the output layer beyond it are padding."""


class PrefixFeatures:
    """Features of the tokens before a root, as the passes of a prefill compute them."""

    def __init__(self, first: int) -> None:
        """`first`: position of the first token whose features are wanted."""
        self.first = first
        self._pieces: list[tuple[int, Tensor]] = []

    def store(self, position: int, rows: Tensor) -> None:
        """Keep the rows of the tokens from `position` on; a pass may be repeated.  # [tokens, F]"""
        skipped = max(0, self.first - position)
        self._pieces = [piece for piece in self._pieces if piece[0] < position]
        self._pieces.append((position + skipped, rows[skipped:].to(torch.bfloat16)))

    def before(self, root: int) -> Tensor | None:
        """The rows of consecutive tokens up to the one before `root`; None without any.  # [tokens, F]"""
        found, end = list[Tensor](), root
        for position, rows in reversed(self._pieces):
            if not position < end <= position + len(rows):
                break
            found.insert(0, rows[: end - position])
            end = position
        return torch.cat(found) if found else None


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows of one verdict, and what its message wants."""

    rows: list[int]
    """Rows of the pass: the root's, then those of the accepted nodes."""
    first: int
    """Position of the root in the text."""
    wants_features: bool
    guess: Callable[[int], Row] | None
    """Sampling input of the token at this depth below the next one; None if no guesses are wanted."""
    prefix: Tensor | None = None
    """Features of the tokens before the root, if they are wanted and were computed.  # [tokens, F]"""


def load_engine_head(config: EngineConfig, loaded: LoadedModel, progress: Callable[[str], None]) -> EngineHead | None:
    """The head of `config.head`, for this model; None without one. Raises: StartupError."""
    if config.head is None:
        return None
    head_config, model, vocab_size = read_head(config.head, config.model), loaded.model, loaded.info.vocab_size
    head_config.check_target(model.config.hidden_size, model.config.vocab_size)
    progress(f"loading the head {head_config.name}")
    embedding, output = _borrowed(config, model, progress)
    head: StateHeads | EagleHead
    if isinstance(head_config, EagleConfig):
        head = load_eagle(head_config, config.head, embedding, output, vocab_size, model.dtype)
    else:
        head = load_head(config.head, output, model.dtype, torch.device(config.device))
    size, tapped = model.config.hidden_size, tapped_layers(config)
    columns = [size * tapped.index(layer) + column for layer in head_config.feature_layers for column in range(size)]
    return EngineHead(head_config.name, head, tuple(columns), vocab_size)


def _borrowed(config: EngineConfig, model: Any, progress: Callable[[str], None]) -> tuple[nn.Module, nn.Module]:
    """The model's embedding and output layer; of a model over several ranks whole copies, because the head runs on
    one."""
    if config.tensor_parallel > 1:
        alone = replace(config, layers=(0,), tensor_parallel=1, expert_parallel=False, compile=False)
        model = load(alone, progress).model
    return model.get_input_embeddings(), model.get_output_embeddings()


def read_features(
    features: Tensor, verdicts: Sequence[CommittedRows], columns: Sequence[int], readback: Readback
) -> Callable[[], list[Features]]:
    """These columns of `features` [R, F], for each verdict. Call the result after the readback."""
    if not verdicts:
        return list
    index = upload([row for each in verdicts for row in each.rows], features.device)
    chosen = features[index].to(torch.bfloat16)
    parts, start = list[Tensor](), 0
    for each in verdicts:
        own = chosen[start : start + len(each.rows)]
        start += len(each.rows)
        parts += [own] if each.prefix is None else [each.prefix, own]
    joined, width = torch.cat(parts), len(columns)
    if width < joined.shape[1]:
        joined = joined[:, upload(list(columns), joined.device)]
    read = readback.add_bytes(joined)

    def by_verdict() -> list[Features]:
        data, begin, found = read(), 0, list[Features]()
        for each in verdicts:
            num_before = 0 if each.prefix is None else len(each.prefix)
            end = begin + 2 * width * (num_before + len(each.rows))
            found.append(Features(each.first - num_before, width, data[begin:end]))
            begin = end
        return found

    return by_verdict


def read_guesses(
    features: Tensor, verdicts: Sequence[CommittedRows], engine_head: EngineHead | None, readback: Readback
) -> Callable[..., list[Guesses]]:
    """The head's guesses below the next token, for each verdict that wants them. Call the result after the readback."""
    wanting = [(index, each.rows[-1], each.guess) for index, each in enumerate(verdicts) if each.guess is not None]
    if not wanting or engine_head is None:
        return lambda *_: [NO_GUESSES] * len(verdicts)
    head = engine_head.head
    assert isinstance(head, StateHeads), "a head with KV has an engine of its own"
    states = features[upload([row for _, row, _ in wanting], features.device)]
    states = states[:, upload(engine_head.columns, features.device)]
    rows = [_draft_row(guess(depth)) for depth in range(head.max_depth) for _, _, guess in wanting]
    logits = torch.cat([head(states, depth)[:, : engine_head.vocab_size] for depth in range(head.max_depth)])
    read = propose(logits, rows, q_top_tokens=1, readback=readback)  # nothing is drawn

    def by_verdict(*_: object) -> list[Guesses]:
        candidates, num = read(), len(wanting)
        found = {index: _tree_of(candidates[place::num]) for place, (index, _, _) in enumerate(wanting)}
        return [found.get(index, NO_GUESSES) for index in range(len(verdicts))]

    return by_verdict


def _draft_row(row: Row) -> DraftRow:
    # A rule that needs q gets the likeliest tokens as guesses without a distribution, like any guesser's.
    return DraftRow(row, Kind.GREEDY if row.sampling.is_greedy else Kind.COUPLED, num_ranks=MAX_SIBLINGS + 1)


def _tree_of(by_depth: Sequence[Candidates | None]) -> Guesses:
    """The likeliest nodes of the tree in which each node of a depth has that depth's candidates."""
    parents, tokens, chances = list[int](), list[int](), list[float]()
    queue = [(-1.0, 0, ROOT)]  # by path probability: nodes that may get children, with the children's depth
    while queue and len(tokens) < MAX_GUESSES:
        path_prob, depth, node = heappop(queue)
        candidates = by_depth[depth]
        if candidates is None:  # NaN or infinite: the target's own logits are checked where they count
            continue
        for token, share in zip(candidates.ranked[:MAX_SIBLINGS], candidates.shares, strict=False):
            if depth + 1 < len(by_depth):
                heappush(queue, (path_prob * share, depth + 1, len(tokens)))
            parents.append(node)
            tokens.append(token)
            chances.append(share)
    return Guesses(tuple(parents), tuple(tokens), tuple(chances))
