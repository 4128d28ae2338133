"""The command line: `arrowbank VERB …`. Verbs import what they need when they run, so that `--help` is quick.

Exit codes: 0 done, 1 a check failed, 2 bad arguments or input, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from arrowbank.cli import heal, in2, join, look, make, search, share, targets, trunk
from arrowbank.cli.first import interrupted, versions, welcome
from arrowbank.cli.help import Verb, Verbs
from arrowbank.errors import ArrowbankError

INTERRUPTED = 130
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

app = typer.Typer(
    name="arrowbank",
    cls=Verbs,
    help="Turn raw text and frozen models into Arrow datasets that trainers open with load_from_disk.",
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)
VERBS: dict[str, tuple[Callable[..., None], ...]] = {
    "Begin here": (make.demo,),
    "Make a bank": (make.build, make.scan, make.tokenize, make.encode),
    "Make a bank of banks": (join.merge, join.select),
    "Train with a bank": (heal.heal,),
    "Look at a bank": (
        look.info,
        look.verify,
        look.report,
        look.estimate,
        look.compare,
        look.lookup,
        search.search,
        search.audit,
    ),
    "Hand a bank on": (targets.export, share.push, share.pull),
}
GROUPS: dict[str, tuple[str, dict[str, Callable[..., None]]]] = {
    "targets": (
        "Hidden states of a big model, for draft models: a bank of their own.",
        {"import": targets.import_, "capture": targets.capture, "verify": targets.verify, "vocab": targets.vocab},
    ),
    "in2": ("Facts planted far from where they are asked for: arms to train on, and their proof.", in2.VERBS),
    "trunk": (
        "What a model with an MTP draft computes itself: the teacher of that draft.",
        {"build": trunk.build},
    ),
}
for panel, verbs in VERBS.items():
    for verb in verbs:
        app.command(cls=Verb, rich_help_panel=panel)(verb)
for group, (meaning, members) in GROUPS.items():
    inside = typer.Typer(cls=Verbs, help=meaning, no_args_is_help=True, context_settings=SETTINGS)
    for name, verb in members.items():
        inside.command(name, cls=Verb)(verb)
    app.add_typer(inside, name=group, rich_help_panel="Make a bank")


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions that matter, and leave.", is_eager=True)
    ] = False,
) -> None:
    if version:
        print(versions())
    elif context.invoked_subcommand is None:
        print(welcome(Path.cwd()), end="")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with `argv` (default: the process's own); the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        app(arguments, prog_name="arrowbank")
    except ArrowbankError as error:
        if "--debug" in arguments:
            raise
        print(f"arrowbank: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            print(interrupted(arguments), file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else 0
    return 0
