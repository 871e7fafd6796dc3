"""The command `outrider` and its subcommands.

Knows commands and exit statuses. A command imports Ray or torch only when it needs them, so that `generate` starts
fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from core.errors import StartupError
from deploy.cli.chat import ChatOptions, chat
from deploy.cli.generate import GenerateOptions, generate
from deploy.cli.index import IndexOptions, index
from deploy.cli.keys import NewKeyOptions, new
from deploy.cli.load import BenchOptions, bench
from deploy.cli.options import add_command
from deploy.cli.planning.check import CheckOptions, check
from deploy.cli.planning.convert import ConvertOptions, convert
from deploy.cli.planning.layers import LayersOptions, layers
from deploy.cli.planning.plan import PlanOptions, plan
from deploy.cli.planning.simulate import SimulateOptions, simulate
from deploy.cli.planning.theory import TheoryOptions, theory
from deploy.cli.replay import ReplayOptions, replay
from deploy.cli.serve import ServeOptions, serve
from deploy.cli.settings import SettingsOptions, settings
from deploy.cli.terminal import say
from deploy.cli.training.distill import DistillOptions, distill
from deploy.cli.training.learn import LearnOptions, learn
from deploy.cli.training.train_head import TrainHeadOptions, train_head
from deploy.receipts import outrider_version

EXIT_NO_START = 2
VALUE_ERROR = "Value error, "
"""Prefix of pydantic, with which typer checks values, in typer's error messages."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"outrider {outrider_version()}")
        raise typer.Exit


@app.callback()
def _any_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding across machines, served."""


add_command(app, "serve", ServeOptions, serve)
add_command(app, "settings", SettingsOptions, settings)
add_command(app, "generate", GenerateOptions, generate)
add_command(app, "chat", ChatOptions, chat)
add_command(app, "replay", ReplayOptions, replay)
add_command(app, "bench", BenchOptions, bench)
add_command(app, "simulate", SimulateOptions, simulate)
add_command(app, "theory", TheoryOptions, theory)
add_command(app, "check", CheckOptions, check)
add_command(app, "plan", PlanOptions, plan)
add_command(app, "layers", LayersOptions, layers)
add_command(app, "index", IndexOptions, index)
add_command(app, "convert", ConvertOptions, convert)
add_command(app, "train-head", TrainHeadOptions, train_head)
add_command(app, "distill", DistillOptions, distill)
add_command(app, "learn", LearnOptions, learn)
keys = typer.Typer(help="Manage the keys of callers.", no_args_is_help=True)
add_command(keys, "new", NewKeyOptions, new)
app.add_typer(keys, name="keys")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        return int(app(argv, prog_name="outrider", standalone_mode=False))
    except typer.TyperException as error:  # a wrong option or value
        if message := error.format_message().replace(VALUE_ERROR, ""):  # empty if help was shown instead
            say(f"outrider: {message}")
    except StartupError as error:
        say(f"outrider: {error}")
    return EXIT_NO_START
