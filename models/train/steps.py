"""The steps of making the pair, one function each. They work in the work folder; `adopt` and `export` use the shipped
pair, too."""

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.train.architecture import SHAPES, build_model, parameter_count
from models.train.card import write_card
from models.train.checkpoints import Progress, checkpoint_path, load_progress, load_trained, save_checkpoint
from models.train.corpus import load_split
from models.train.evaluation import evaluate
from models.train.export import DEMO_FOLDER, as_exported, export_model
from models.train.history import history_path, read_history, write_history
from models.train.loop import Run, train
from models.train.objectives import Objective, distillation_from, next_token_loss
from models.train.sampling import continue_prompts
from models.train.schedule import Schedule
from models.train.stream import token_stream, training_windows
from models.train.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

logger = logging.getLogger(__name__)

SAMPLED_ROWS: Final = 64
SAMPLED_PROMPT_TOKENS: Final = 32
SAMPLED_TOKENS: Final = 224
SAMPLED_TEMPERATURES: Final = (1.0, 0.7, 0.0)
"""Temperatures of the sampled batches, in turn: requests use all of them."""
COMPARED: Final = ("acceptance", "runs")
"""Parts of other drafts' evaluations that the card shows and that are kept with the shipped pair's."""


@dataclass(frozen=True)
class Setting:
    """Settings that all steps share."""

    work: Path
    seed: int
    device: torch.device
    is_bf16: bool


def make_tokenizer(setting: Setting) -> None:
    """Train the tokenizer and encode the training files once."""
    split = load_split()
    tokenizer = train_tokenizer(document.text for document in split.training)
    save_tokenizer(tokenizer, setting.work / "tokenizer")
    stream = token_stream(tokenizer, (document.text for document in split.training))
    torch.save(stream, setting.work / "training_stream.pt")
    logger.info(
        "%d training files, %d held out; %d training tokens",
        len(split.training),
        len(split.held_out),
        len(stream),
    )


def adopt(setting: Setting) -> None:
    """Import the shipped pair as finished runs, so that a new work folder can continue from it.

    Imports the weights (in bf16, as shipped), the history and progress of the runs, and the evaluations, with that of
    the shipped pair as `shipped`. Optimizer state is not shipped.
    """
    if history_path(setting.work).exists():
        raise SystemExit(f"{setting.work} has runs of its own, which are not overwritten")
    make_tokenizer(setting)
    if trained_tokenizer(setting).get_vocab() != load_tokenizer(DEMO_FOLDER / "target").get_vocab():
        raise SystemExit("this Python's standard library gives another tokenizer than the shipped pair has")
    figures = read_json(DEMO_FOLDER / "evaluation.json")
    for role, run in zip(SHAPES, figures["runs"], strict=True):
        model = LlamaForCausalLM.from_pretrained(DEMO_FOLDER / role, dtype=torch.float32)
        save_checkpoint(checkpoint_path(setting.work, run), model, [], Progress(**figures["runs"][run]))
    for name, evaluation in (figures["compared"] | {"shipped": figures}).items():
        write_json(setting.work / f"{name}.json", evaluation)
    write_history(setting.work, figures["history"])


def make_target(setting: Setting, name: str, schedule: Schedule, start: str) -> None:
    """Train the target on the training files."""
    model = start_of(setting, start, name, "target")
    run_training(setting, name, "target", next_token_loss, training_stream(setting), schedule, model)


def make_draft(
    setting: Setting,
    name: str,
    schedule: Schedule,
    target: str,
    objective: str,
    sampled: str,
    start: str,
) -> None:
    """Distil the draft from the run `target`, on the training files and on text sampled from the target."""
    teacher = load_trained(checkpoint_path(setting.work, target), "target").to(setting.device)
    model = start_of(setting, start, name, "draft")
    stream = distillation_stream(setting, sampled)
    run_training(setting, name, "draft", distillation_from(teacher, objective), stream, schedule, model)


def distillation_stream(setting: Setting, sampled: str) -> Tensor:
    """The training files, and about as many tokens of sampled text if there is any, repeated if it is shorter."""
    files = training_stream(setting)
    if not sampled:
        return files
    texts: Tensor = torch.load(setting.work / f"{sampled}.pt", weights_only=True)
    return torch.cat([files, texts.repeat(max(1, len(files) // len(texts)))])


def run_training(
    setting: Setting, name: str, role: str, objective: Objective, stream: Tensor, schedule: Schedule, model: Any = None
) -> None:
    """Train a model of `role` (by default a new one) and save it under `name`."""
    torch.manual_seed(setting.seed)
    model = model or build_model(role)
    path = checkpoint_path(setting.work, name)
    run = Run(model, objective, stream, schedule, path, setting.seed, setting.device, setting.is_bf16)
    logger.info("%s: %d parameters, %d tokens, %.1f min", name, parameter_count(model), len(stream), schedule.minutes)
    progress: Progress = train(run)
    logger.info("%s: done, %d steps, %d tokens, loss %.3f", name, progress.step, progress.tokens, progress.loss)


def make_samples(setting: Setting, name: str, target: str, minutes: float) -> None:
    """Let the target continue random excerpts of the training files, to distil the draft on the result.

    In service a draft sees text of this kind: the target's own, with its mistakes.
    """
    model = load_trained(checkpoint_path(setting.work, target), "target").to(setting.device)
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    stream = training_stream(setting)
    batches: list[Tensor] = []
    end_s = time.monotonic() + 60 * minutes
    while time.monotonic() < end_s:
        temperature = SAMPLED_TEMPERATURES[len(batches) % len(SAMPLED_TEMPERATURES)]
        prompts = training_windows(stream, SAMPLED_PROMPT_TOKENS, SAMPLED_ROWS, len(batches), setting.seed)
        texts = continue_prompts(model, prompts.to(setting.device), SAMPLED_TOKENS, temperature, generator)
        batches.append(texts.flatten().to("cpu", torch.int32))
        logger.info("%d batches, %.1f min to go", len(batches), (end_s - time.monotonic()) / 60)
    torch.save(torch.cat(batches), setting.work / f"{name}.pt")
    logger.info("%s: %d tokens", name, sum(len(batch) for batch in batches))


def training_stream(setting: Setting) -> Tensor:
    """The tokens of the training files, saved by `make_tokenizer`."""
    stream: Tensor = torch.load(setting.work / "training_stream.pt", weights_only=True)
    return stream


def trained_tokenizer(setting: Setting) -> Any:
    return load_tokenizer(setting.work / "tokenizer")


def measure(setting: Setting, name: str, target: str, draft: str) -> None:
    """Measure the models of two runs on the held-out files, with weights as they would be exported."""
    split = load_split()
    tokenizer = trained_tokenizer(setting)
    pair = {role: as_exported(trained(setting, run, role)) for role, run in (("target", target), ("draft", draft))}
    held_out = token_stream(tokenizer, (document.text for document in split.held_out))
    figures = {
        "seed": setting.seed,
        "files": {"training": len(split.training), "held_out": len(split.held_out)},
        "training_tokens": len(training_stream(setting)),
        "parameters": {role: parameter_count(model) for role, model in pair.items()},
        "runs": {run: asdict(load_progress(checkpoint_path(setting.work, run))) for run in (target, draft)},
        **evaluate(pair, tokenizer, held_out, setting.seed),
    }
    write_json(setting.work / f"{name}.json", figures)
    logger.info("%s: %s", name, json.dumps([figures["losses"], figures["acceptance"]], indent=1))


def export(setting: Setting, target: str, draft: str, evaluation: str, compare: list[str]) -> None:
    """Write the model folders and, if `evaluation` is given, its figures and the card."""
    tokenizer = trained_tokenizer(setting)
    DEMO_FOLDER.mkdir(parents=True, exist_ok=True)
    for role, run in (("target", target), ("draft", draft)):
        export_model(trained(setting, run, role), tokenizer, DEMO_FOLDER / role)
    if evaluation:
        compared = {name: read_json(setting.work / f"{name}.json") for name in compare}
        figures = read_json(setting.work / f"{evaluation}.json") | {
            "history": read_history(setting.work),
            "compared": {name: {key: each[key] for key in COMPARED} for name, each in compared.items()},
        }
        write_json(DEMO_FOLDER / "evaluation.json", figures)
        write_card(figures, compared)


def start_of(setting: Setting, start: str, name: str, role: str) -> Any:
    """The model of the run `start`, for the run `name` to continue; None to start anew."""
    if start == name:
        raise SystemExit(f"a run that goes on from {start} needs a --name of its own")
    return trained(setting, start, role).requires_grad_(True) if start else None


def trained(setting: Setting, run: str, role: str) -> Any:
    return load_trained(checkpoint_path(setting.work, run), role)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write indented JSON, so that diffs show changed figures line by line."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values
