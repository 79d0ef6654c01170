"""The `spindle` command: its table of commands, and where every failure becomes one message and an exit code.

A command is one file, `cli/<name>_command.py`, with one function of the command's name. It parses, calls its
stage, and prints:

    def check(
        plan: PlanArgument,
        profile: Annotated[Path | None, typer.Option("--profile", help="...")] = None,
        as_json: JsonOption = False,
    ) -> None:
        '''Check a plan without the planner's code.'''          <- first line: as in COMMANDS below
        from spindle_cli.check.run import check_plan             <- stages are imported inside the function

        violations = check_plan(Plan.read(plan), ...)
        output.report(as_json, Document(...), text)              <- JSON document or text, on standard output
        if violations:
            raise typer.Exit(ExitCode.FAILED)                    <- or raise a SpindleError with its message

It catches nothing: `cli/failures.py` maps exceptions to messages. What several commands take is declared
once, in `cli/options.py`. A line in `COMMANDS` makes the command exist; its module is imported only when
used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from spindle_cli.cli.failures import end_with
from spindle_cli.process.environment import ranks_per_gpu
from spindle_cli.process.lifetime import interruptible, look_for_garbage_rarely

# Name and one-line help of every command, in the order in which they are used.
COMMANDS: dict[str, str] = {
    "init": "Write a workload file and its Python stub for a model of yours.",
    "profile": "Measure or estimate a workload's scaling curves.",
    "plan": "Plan a profiled workload for a cluster.",
    "check": "Check a plan without the planner's code.",
    "show": "Draw a plan's schedule, or one rank's program.",
    "compare": "Compare all strategies on a profile and a cluster.",
    "sweep": "Plan for several numbers of devices, or with more of one type.",
    "diff": "Show what changed between two plans.",
    "explain": "Explain what binds a plan, and what one more device is worth.",
    "simulate": "Predict a plan's timeline without devices.",
    "report": "Write a plan as a web page: one file that works offline.",
    "verify": "Prove that a plan trains the same model.",
    "launch": "Train by a plan.",
    "calibrate": "Correct a profile by what runs have measured.",
    "watch": "Show a run as it goes on, as a web page on this machine.",
    "export": "Write a run's trained model as safetensors.",
}

# Commands that say themselves from where on they have begun something that Ctrl-C must not leave behind.
END_AT_ONCE = ("launch",)

# Commands that make plans.
PLANNING = ("plan", "compare", "sweep", "explain")


def load_command(name: str) -> Any:
    """The command's parser, from the function `name` in `spindle_cli.cli.<name>_command`."""
    function = cast("Callable[..., None]", getattr(import_module(f"spindle_cli.cli.{name}_command"), name))
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name)(function)
    return typer.main.get_command(single)


class LazyGroup(TyperGroup):
    """Knows every command's name and help; imports the module of the one that is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, help_text in COMMANDS.items():
            self.commands[name] = TyperCommand(name=name, help=help_text)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Like the base class's, but with the real command for the one that is used."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in PLANNING:
            look_for_garbage_rarely()
        command = command if name is None else load_command(name)
        if name not in END_AT_ONCE:
            interruptible()
        return name, command, rest

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Parse; the command's own help and version are printed here, to a reader that may be gone."""
        with end_with(debug=False):
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a failure ends in one message on standard error and its exit code."""
        with end_with(debug=bool(ctx.params.get("debug"))):
            ranks_per_gpu()  # what is none is refused also where nothing asks for a GPU
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


# Plain text, not rich panels: help starts in half the time, and errors can be searched and piped.
app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from spindle_cli import __version__

        typer.echo(f"spindle {__version__}")
        raise typer.Exit


@app.callback()
def spindle(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
) -> None:
    """Plan and launch distributed training of multi-task, multi-modal models.

    The way through: profile a workload, plan it for a cluster, check and show the plan, verify it, launch it.
    """


def run() -> None:
    """Entry point of `spindle` and `python -m spindle_cli`; ends the process."""
    app(prog_name="spindle")
