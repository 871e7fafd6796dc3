"""Command line of the training program: one subcommand per step, in the order in which they are run."""

import argparse
import logging
import sys
import time
from pathlib import Path

import torch

from models.train import steps
from models.train.history import record
from models.train.schedule import Schedule
from models.train.steps import Setting
from workers.training import OBJECTIVES


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = build_parser().parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    start_logging(options.work / f"{options.name}.log")
    if options.threads:
        torch.set_num_threads(options.threads)
    setting = Setting(options.work, options.seed, torch.device(options.device), options.bf16)
    started = time.monotonic()
    run_step(setting, options)
    record(options.work, arguments, time.monotonic() - started)
    return 0


def run_step(setting: Setting, options: argparse.Namespace) -> None:
    match options.step:
        case "tokenizer":
            steps.make_tokenizer(setting)
        case "adopt":
            steps.adopt(setting)
        case "target":
            steps.make_target(setting, options.name, schedule_of(options), options.start)
        case "sample":
            steps.make_samples(setting, options.name, options.target, options.minutes)
        case "draft":
            schedule = schedule_of(options)
            given = (options.target, options.objective, options.sampled, options.start)
            steps.make_draft(setting, options.name, schedule, *given)
        case "evaluate":
            steps.measure(setting, options.name, options.target, options.draft)
        case "export":
            steps.export(setting, options.target, options.draft, options.evaluation, options.compare)


def schedule_of(options: argparse.Namespace) -> Schedule:
    return Schedule(options.minutes, options.rate, step_tokens=options.step_tokens, long_from_share=options.long_from)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    commands = parser.add_subparsers(dest="step", required=True)
    add_step(commands, "tokenizer", "train the tokenizer and encode the training files")
    add_step(commands, "adopt", "begin with the shipped pair: its tokenizer, its runs and their history")
    target = add_step(commands, "target", "train the target")
    add_schedule(target, minutes=65.0, rate=2e-3)
    target.add_argument("--start", default="", help="name of a finished target's run to go on from")
    sample = add_step(commands, "sample", "let the target write text to distil on")
    sample.add_argument("--target", default="target", help="name of the target's run")
    sample.add_argument("--minutes", type=float, default=4.0, help="time to sample for (default: 4)")
    draft = add_step(commands, "draft", "distil the draft from the target")
    add_schedule(draft, minutes=35.0, rate=4e-3)
    draft.add_argument("--target", default="target", help="name of the target's run")
    draft.add_argument("--sampled", default="", help="name of a `sample` run to distil on as well")
    draft.add_argument(
        "--objective", default="kl", choices=list(OBJECTIVES), help="what the draft minimises (default: kl)"
    )
    draft.add_argument("--start", default="", help="name of a finished draft's run to go on from")
    for name, text in (("evaluate", "measure the pair on held-out files"), ("export", "write the model folders")):
        step = add_step(commands, name, text)
        step.add_argument("--target", default="target", help="name of the target's run")
        step.add_argument("--draft", default="draft", help="name of the draft's run")
    step.add_argument("--evaluation", default="", help="name of the `evaluate` run to write the model card from")
    step.add_argument("--compare", nargs="*", default=[], help="names of `evaluate` runs of other drafts, for the card")
    return parser


def add_step(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    """Add a subcommand with the options that all steps share."""
    parser = commands.add_parser(name, help=text)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and logs, outside the repo")
    parser.add_argument("--name", default=name, help="name of this run in the work folder (default: the step's)")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, order and samples (default: 1)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True, help="bf16 autocast")
    return parser


def add_schedule(parser: argparse.ArgumentParser, minutes: float, rate: float) -> None:
    """Add the options of a training step."""
    parser.add_argument("--minutes", type=float, default=minutes, help=f"length of the run (default: {minutes:g})")
    parser.add_argument("--rate", type=float, default=rate, help=f"peak learning rate (default: {rate:g})")
    parser.add_argument("--step-tokens", type=int, default=8192, help="tokens a step (default: 8192)")
    parser.add_argument(
        "--long-from", type=float, default=0.88, help="share of the time after which windows are long (default: 0.88)"
    )


def start_logging(path: Path) -> None:
    """Log to standard error and to a file."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr), logging.FileHandler(path)]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=handlers)


if __name__ == "__main__":
    sys.exit(main())
