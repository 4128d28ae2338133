"""The command line: `arrowbank VERB …`. Verbs import what they need when they run, so that `--help` is quick.

Exit codes: 0 done, 1 a check failed, 2 bad arguments or input, 70 an internal error (a bug), 130 interrupted.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from arrowbank.cli import in2, join, look, make, mtp, search_commands, share, targets
from arrowbank.cli.first import interrupted, versions, welcome
from arrowbank.cli.help import CONTEXT, Verbs
from arrowbank.errors import ArrowbankError
from arrowbank.secrets import forgetting, hide_output, hiding_output, redact

INTERNAL, INTERRUPTED = 70, 130

VERBS: dict[str, tuple[Callable[..., None], ...]] = {
    "Begin here": (make.demo,),
    "Make a bank": (make.build, make.scan, make.tokenize, make.encode),
    "Make a bank of banks": (join.merge, join.select),
    "Train with a bank": (mtp.heal,),
    "Look at a bank": (
        look.info,
        look.verify,
        look.report,
        look.estimate,
        look.compare,
        look.lookup,
        search_commands.search,
        search_commands.audit,
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
        {"build": mtp.build},
    ),
}
VERB_NAMES = {verb.__name__ for verbs in VERBS.values() for verb in verbs} | {
    f"{group} {name}" for group, (_, members) in GROUPS.items() for name in members
}
top = typer.Typer(
    name="arrowbank",
    cls=Verbs,
    help="Turn raw text and frozen models into Arrow datasets that trainers open with load_from_disk.",
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


@top.callback(invoke_without_command=True)
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


app: Any = typer.main.get_command(top)
for panel, verbs in VERBS.items():
    for verb in verbs:
        app.add(verb.__name__, verb, panel)
for group, (meaning, members) in GROUPS.items():
    inside = Verbs(name=group, help=meaning, no_args_is_help=True, context_settings=CONTEXT)
    for name, verb in members.items():
        inside.add(name, verb, "Verbs")
    app.add(group, inside, "Make a bank")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with `argv` (default: the process's own); the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _take_any_bytes()
    if argv is None:  # the process is ours: what ends it is printed after this
        hide_output()
        return _run(arguments)
    with forgetting(), hiding_output():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    if any(":/" in word for word in arguments):
        from arrowbank.bank.remote.addresses import know_secrets_of

        for word in arguments:
            know_secrets_of(word)
    try:
        app(arguments, prog_name="arrowbank")
    except ArrowbankError as error:
        if "--debug" in arguments:
            raise
        print(f"arrowbank: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before Typer is there to take it
        print(interrupted(arguments), file=sys.stderr)
        return INTERRUPTED
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            print(interrupted(arguments), file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else 0
    except Exception as error:  # noqa: BLE001  # the outer net: nothing a user gives may end here, so it is a bug and says so
        if "--debug" in arguments:
            traceback.print_exception(error)
        from arrowbank.bank.refusals import explain

        if isinstance(error, OSError) and (refusal := explain(error, Path.cwd(), "used")):  # outside of any stage
            print(f"arrowbank: {refusal}", file=sys.stderr)
            return refusal.exit_code
        print(internal_error(arguments, error), file=sys.stderr)
        return INTERNAL
    return 0


def internal_error(arguments: Sequence[str], error: Exception) -> str:
    """What to say about an exception that nothing in arrowbank expected."""
    from arrowbank.bank.checks import reason

    verb = next((name for name in (" ".join(arguments[:2]), *arguments[:1]) if name in VERB_NAMES), "the command line")
    if "--debug" in arguments:
        remedy = "Report it with the traceback above."
    else:
        remedy = "Run the command again with --debug for the traceback, and report it."
    said = redact(reason(error))
    return f"arrowbank: internal error in {verb}: {said}. This is a bug in arrowbank. {remedy}"


def _take_any_bytes() -> None:
    """Let no byte that the terminal's encoding has not be an error: coming in it is a question mark, going out an escape."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
