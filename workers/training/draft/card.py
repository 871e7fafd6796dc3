"""Writes the card of a distilled draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.training.draft.distillation import DraftAgreement

CARD = """---
license: {license}
tags: [speculative-decoding, distillation]
---
# A draft for {target}

Distilled from {target}, starting from {start}: {steps} steps by the objective {objective} at temperature
{temperature:g}, on {num_texts} texts with {num_tokens} tokens. Each twentieth text was held out. Weights are bfloat16.
Licences, as far as a card or LICENSE says them: {licenses}.

Made by `{command}`

Mean chance that the draft's next token is accepted, after the held-out texts' own tokens. *Greedy*: both models'
likeliest tokens agree. *Rejection*: Σ min(p, q). *Coupled*: both draw the same token with the same noise.

| texts | T of the texts | tokens | {columns} |
| --- | --- | --- | {lines} |
{rows}
"""


def write_card(
    folder: Path,
    before: Mapping[tuple[str, float], DraftAgreement],
    after: Mapping[tuple[str, float], DraftAgreement],
    **facts: Any,
) -> None:
    """Write README.md. `before`, `after`: by kind of text and temperature; `facts`: the other fields of the card."""
    rules = list(next(iter(after.values())).by_rule)
    columns = [rule if rule == "greedy" else f"{rule}, T = {temperature:g}" for temperature, rule in rules]
    rows = [
        f"| {kind}{stage} | {temperature:g} | {each.num_tokens} | {_cells(each)} |"
        for kind, temperature in after
        for stage, each in ((", before", before[kind, temperature]), ("", after[kind, temperature]))
    ]
    table = {"columns": " | ".join(columns), "lines": " | ".join(["---"] * len(rules)), "rows": "\n".join(rows)}
    (folder / "README.md").write_text(CARD.format(**table, **facts))


def _cells(found: DraftAgreement) -> str:
    return " | ".join(f"{share:.3f}" for share in found.by_rule.values())
