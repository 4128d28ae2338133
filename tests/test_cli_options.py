"""The options of the verbs: each is declared once, and earlier spellings work with a warning."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer

from arrowbank.cli import app, main
from tests.test_cli import every_verb


def command(verb: str) -> Any:
    found: Any = typer.main.get_command(app)
    for word in verb.split():
        found = found.commands[word]
    return found


RENAMED = [(verb, old, new) for verb in every_verb() for old, new in getattr(command(verb).callback, "renamed", {}).items()]


@pytest.mark.parametrize(("verb", "old", "new"), RENAMED)
def test_an_earlier_spelling_is_taken_as_todays_and_says_so(
    verb: str, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = command(verb)
    option = next(param for param in found.params if new in param.opts)
    assert old not in [name for param in found.params for name in (*param.opts, *param.secondary_opts)]
    for words in ([old, "7"], [f"{old}=7"]):
        context = found.make_context(verb, [], resilient_parsing=True)
        found.parse_args(context, words)
        value = context.params[option.name]
        assert str(value[0] if isinstance(value, list | tuple) else value) == "7"
        assert capsys.readouterr().err == f"arrowbank: {old} is now {new}\n"
    assert main([*verb.split(), "--help"]) == 0
    assert not re.search(rf"{old}(?![\w-])", capsys.readouterr().out)


def test_a_value_that_looks_like_an_earlier_spelling_stays_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = command("heal")
    context = found.make_context("heal", [], resilient_parsing=True)
    found.parse_args(context, ["--trunk", "--hidden", "--", "--hidden"])
    assert context.params["trunk"] == "--hidden"
    assert capsys.readouterr().err == ""
