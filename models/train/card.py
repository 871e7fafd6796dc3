"""Writes the figures of an evaluation into the model card. The text is in `card.md`, the tables are built here."""

import platform
from pathlib import Path
from string import Template
from typing import Any, Final

from models.train.architecture import SHAPES
from models.train.evaluation import CONTINUATION_TOKENS, PROMPT_TOKENS, PROMPTS, SAMPLE_TOKENS
from models.train.schedule import Schedule

CARD: Final = Path(__file__).parents[1] / "README.md"
TEMPLATE: Final = Path(__file__).with_name("card.md")
RULE_ORDER: Final = ((0.0, "greedy"), (0.7, "rejection"), (0.7, "coupled"), (1.0, "rejection"), (1.0, "coupled"))

Figures = dict[str, Any]


def write_card(figures: Figures, comparisons: dict[str, Figures]) -> None:
    """Replace models/README.md. `comparisons` has the evaluations of other drafts, by name."""
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    CARD.write_text(template.substitute(substitutions(figures, comparisons)), encoding="utf-8")


def substitutions(figures: Figures, comparisons: dict[str, Figures]) -> dict[str, str]:
    """Every name the template uses."""
    return {
        **schedule_values(figures),
        "python": platform.python_version(),
        "shapes": shapes_table(figures),
        "training_files": str(figures["files"]["training"]),
        "held_out_files": str(figures["files"]["held_out"]),
        "training_tokens": f"{figures['training_tokens']:,}",
        "held_out_tokens": f"{figures['held_out_tokens']:,}",
        "commands": "\n".join(each["command"] for each in figures["history"]),
        "runs": runs_table([*comparisons.values(), figures]),
        "losses": losses_table(figures),
        "acceptance": acceptance_table(figures),
        "comparisons": comparisons_table(comparisons),
        "samples": samples_text(figures),
        "prompts": str(PROMPTS),
        "prompt_tokens": str(PROMPT_TOKENS),
        "continuation_tokens": str(CONTINUATION_TOKENS),
        "sample_tokens": str(SAMPLE_TOKENS),
    }


def rows_text(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def shapes_table(figures: Figures) -> str:
    """Both shapes side by side."""
    count = ["parameters", *(f"{figures['parameters'][role]:,}" for role in SHAPES)]
    return rows_text([count, *([key, *(str(SHAPES[role][key]) for role in SHAPES)] for key in SHAPES["target"])])


def schedule_values(figures: Figures) -> dict[str, str]:
    """Values of the schedule for the template."""
    schedule = Schedule(minutes=1, peak_rate=0)
    return {
        "long_percent": f"{100 * (1 - schedule.long_from_share):.0f}",
        "warmup_percent": f"{100 * schedule.warmup_share:.0f}",
        "decay_percent": f"{100 * schedule.decay_from_share:.0f}",
        "seed": str(figures["seed"]),
    }


def runs_table(evaluations: list[Figures]) -> str:
    """Time, steps and tokens of every run named in the evaluations."""
    runs = {name: run for figures in evaluations for name, run in figures["runs"].items()}
    training_tokens = evaluations[-1]["training_tokens"]
    return rows_text([run_row(name, run, training_tokens) for name, run in runs.items()])


def run_row(name: str, run: Figures, training_tokens: int) -> list[str]:
    epochs = f"{run['tokens'] / training_tokens:.2f}"
    wall = f"{run['elapsed_s'] / 60:.1f} min"
    return [f"`{name}`", wall, f"{run['step']:,}", f"{run['tokens']:,}", epochs, f"{run['loss']:.3f}"]


def losses_table(figures: Figures) -> str:
    return rows_text(
        [
            [each["role"], str(each["context_tokens"]), f"{each['nats_per_token']:.3f}", f"{each['perplexity']:.1f}"]
            for each in figures["losses"]
        ]
    )


def acceptance_table(figures: Figures) -> str:
    return rows_text(
        [
            [f"{each['temperature']:g}", each["rule"], f"{each['alpha']:.3f} ± {each['standard_error']:.3f}"]
            for each in figures["acceptance"]
        ]
    )


def comparisons_table(comparisons: dict[str, Figures]) -> str:
    """Acceptance in each of the compared evaluations."""
    return rows_text([[label, *alphas(figures)] for label, figures in comparisons.items()])


def alphas(figures: Figures) -> list[str]:
    """Acceptance in the order of the comparison's columns, `RULE_ORDER`."""
    by_key = {(each["temperature"], each["rule"]): each["alpha"] for each in figures["acceptance"]}
    return [f"{by_key[key]:.3f}" for key in RULE_ORDER]


def samples_text(figures: Figures) -> str:
    """Each prompt and the target's completion."""
    blocks = [
        f"Prompt:\n\n```python\n{each['prompt']}```\n\nCompletion:\n\n```python\n{each['completion']}\n```"
        for each in figures["samples"]
    ]
    return "\n\n".join(blocks)
