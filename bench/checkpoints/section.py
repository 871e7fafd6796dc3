"""The section of docs/families.md on checkpoints. Knows findings; must not know how they are made."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

from bench.checkpoints.tried import KV_TOKENS, NUM_TOKENS, SERVED, Tried

TITLE, BEGIN, END = "# Families\n\n", "## Checkpoints: ", "## Architectures\n\n"
SECTION = """## Checkpoints: {num_served} of {num} served

Thirty of the most used open checkpoints, chosen by hand. Each one's config.json (`bench/checkpoints/configs/`: as
published, but not fetched, since the hub could not be reached) is made small: four layers or one period of their kinds,
narrow, eight experts; heads to a KV head, dimensions, rotary embeddings and kinds of layers are kept. Random weights
are stored as the checkpoint's are, quantized and under the names of a multimodal model, and loaded as a user's are. No
published weights were read. To add a checkpoint, put its config.json beside the others. This section alone:
`python -m bench families --checkpoints --write docs/families.md`.

- *served*: the engine's {tokens} greedy tokens, verified in chains whose last guess is wrong, are those of
  transformers' own class with the dequantized weights. By its full config.json the model fits on these GPUs, the least
  that were tried: its weights, a step, and {kv:,} tokens of KV. `outrider check --target CONFIG --gpu h200:2` says what
  others hold.
- *refused*: with this reason.
- *parameters*: of all parts, experts and vision included.
- *tested*: the day since which it is served, or of the last run.

| checkpoint | parameters | stored as | here | least GPUs, context; or why not | tested |
| --- | --- | --- | --- | --- | --- |
{rows}

"""


def with_section(page: str, rows: Sequence[Tried], before: str) -> str:
    """The page with this section first, new or in place of an older one.

    `before` is the page as it was, from which served checkpoints have the day since when they are.
    """
    title, _, rest = page.partition(TITLE)
    architectures = rest.partition(END)[2] if rest.startswith(BEGIN) else rest
    return f"{title}{TITLE}{_section(rows, before)}{END}{architectures}"


def _section(rows: Sequence[Tried], before: str) -> str:
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return SECTION.format(
        num_served=sum(row.outcome == SERVED for row in rows),
        num=len(rows),
        tokens=NUM_TOKENS,
        kv=KV_TOKENS,
        rows="\n".join(_row(row, before, today) for row in rows),
    )


def _row(row: Tried, before: str, today: str) -> str:
    start = f"| {row.name} | {row.size} | {row.stored_as} | {row.outcome} |"
    known = re.search(rf"^{re.escape(start)}.*\| ([\d-]+) \|$", before, re.MULTILINE)
    day = known[1] if known is not None and row.outcome == SERVED else today
    return f"{start} {row.detail.replace('|', '/')} | {day} |"
