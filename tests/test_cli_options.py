"""The options of the verbs: each is declared once, in a config or by the verb; earlier spellings work with a warning."""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arrowbank import (
    AuditConfig,
    BuildConfig,
    CaptureConfig,
    EncodeConfig,
    ExportConfig,
    HealConfig,
    ImportConfig,
    In2Config,
    ModelConfig,
    ProbesConfig,
    PushConfig,
    ReportConfig,
    RunOptions,
    ScanConfig,
    ScoreConfig,
    SearchConfig,
    SelectConfig,
    TokenizeConfig,
    TrunkConfig,
    TrunkData,
)
from arrowbank.cli import app, main
from arrowbank.cli.options import Common, Option, options_of
from arrowbank.errors import InputError
from arrowbank.settings import Flag, Help, Range, core_of, hints_of, mark, marks
from tests.test_cli import every_verb


def command(verb: str) -> Any:
    found: Any = app
    for word in verb.split():
        found = found.commands[word]
    return found


def options(verb: str) -> list[Option]:
    """The options of a verb that its configs declare."""
    return [option for kind in command(verb).callback.configs.values() for option in options_of(kind).values()]


RENAMED = [(verb, old, new) for verb in every_verb() for old, new in command(verb).callback.renamed.items()]
BOUNDED = [
    (verb, option, bound)
    for verb in every_verb()
    for option in options(verb)
    for bound in marks(option.hint)
    if isinstance(bound, Range) and core_of(option.hint) in (int, float) and option.help.read is None
]


@pytest.mark.parametrize("verb", every_verb())
def test_every_option_has_help_and_is_shown_once(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*verb.split(), "--help"]) == 0
    shown = re.findall(r"^  (-[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(shown) == len(set(shown))
    for param in command(verb).params:
        if param.name in ("json", "debug", "help") or getattr(param, "hidden", False):
            continue
        assert param.param_type_name == "argument" or param.opts[0] in shown
        assert param.help or param.param_type_name == "argument", f"{verb}: {param.name} has no help"
    for option in options(verb):
        assert option.help.text, f"{verb}: {option.name} has no help"
        assert option.default is not None or mark(option.hint, Help, Help("")).text


@pytest.mark.parametrize(("verb", "old", "new"), RENAMED)
def test_an_earlier_spelling_is_taken_as_todays_and_says_so(
    verb: str, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = command(verb)
    new, equals, fixed = new.partition("=")  # a flag may have become a value of an option
    option = next(param for param in found.params if new in param.opts)
    assert old not in [name for param in found.params for name in (*param.opts, *param.secondary_opts)]
    expected = fixed or ("True" if option.is_flag else "7")
    for words in [[old]] if option.is_flag or fixed else [[old, "7"], [f"{old}=7"]]:
        context = found.make_context(verb, [], resilient_parsing=True)
        found.parse_args(context, words)
        value = context.params[option.name]
        assert str(value[0] if isinstance(value, list | tuple) else value) == expected
        assert capsys.readouterr().err == f"arrowbank: {old} is now {new}{equals}{fixed}\n"
    assert main([*verb.split(), "--help"]) == 0
    assert not re.search(rf"{old}(?![\w-])", capsys.readouterr().out)


def test_a_value_that_looks_like_an_earlier_spelling_stays_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = command("heal")
    context = found.make_context("heal", [], resilient_parsing=True)
    found.parse_args(context, ["--trunk", "--hidden", "--", "--hidden"])
    assert context.params["trunk"] == "--hidden"
    assert capsys.readouterr().err == ""


def complete_line(verb: str) -> list[str]:
    """The verb with a value for all that must be given."""
    words = verb.split()
    for param in command(verb).params:
        if param.required or param.opts[0] in ("--model", "--source"):
            value = (
                "a=b"
                if "=" in str(param.metavar)
                else str(param.metavar).split("|")[0]
                if "|" in str(param.metavar)
                else "1000"
            )
            words += [param.opts[0], value] if param.param_type_name == "option" else [value]
    return words


@pytest.mark.parametrize(("verb", "option", "bound"), BOUNDED, ids=lambda value: getattr(value, "name", str(value)))
def test_a_value_out_of_bounds_is_refused_with_the_option(
    verb: str, option: Option, bound: Range, capsys: pytest.CaptureFixture[str]
) -> None:
    beyond = [
        *([bound.least - 1] if bound.least is not None else []),
        *([bound.most + 1] if bound.most is not None else []),
        *([bound.above] if bound.above is not None else []),
        *([bound.below] if bound.below is not None else []),
    ]
    for value in beyond:
        words = [*complete_line(verb), f"{option.flag}={value:g}"]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert option.flag in error
        assert f"expected {bound}" in error


# reading


@given(st.lists(st.integers(-1, 99), min_size=1))
def test_numbers_are_read_as_they_are_written(numbers: list[int]) -> None:
    option = Option("layers", tuple[int, ...], (), Help("", example="1,3"))
    assert option.read(",".join(map(str, numbers))) == tuple(numbers)


@given(st.text(max_size=8))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    for hint, help in ((tuple[int, ...], Help("")), (tuple[int, int], Help("", "A:B")), (tuple[float, ...], Help(""))):
        option = Option("some", hint, (), help)
        said = ""
        try:
            assert all(isinstance(one, int | float) for one in option.read(text))
        except InputError as error:
            said = str(error)
        assert said == "" or said.startswith(f"--some {text!r}: expected ")


# a config of the command line is that of Python

MODEL = ModelConfig(model="m")
MADE: dict[str, Any] = {  # a verb with the least that it needs, and the config that these words mean
    "audit b --source x=a --source y=b": AuditConfig(scan=ScanConfig(sources=(("x", "a"), ("y", "b")))),
    "build --out o --source x=a --model m": BuildConfig(
        scan=ScanConfig(sources=(("x", "a"),)), tokenize=TokenizeConfig(tokenizer="m"), encode=EncodeConfig(model=MODEL)
    ),
    "encode t --out o --model m": EncodeConfig(model=MODEL),
    "in2 build --out o --arm c --length 4000 --examples 8 --triples 4": In2Config(arm="c", length=4000, examples=8, triples=4),
    "scan --out o --source x=a": ScanConfig(sources=(("x", "a"),)),
    "targets capture --out o --model m --source c.jsonl --layers 1,2": CaptureConfig(
        model=MODEL, data="c.jsonl", target_layer_ids=(1, 2)
    ),
    "targets import d --out o": ImportConfig(),
    "tokenize t --out o --tokenizer m": TokenizeConfig(tokenizer="m"),
    "trunk build --out o --model m --source x=a": TrunkConfig(model=MODEL, sources=(TrunkData("x", "a"),)),
    "heal --trunk t --out o --model m": HealConfig(model=MODEL),
    "in2 probes --out o --length 4000": ProbesConfig(length=4000),
    "in2 score p --out o --model m": ScoreConfig(models=(MODEL,)),
    "export b --out o --to deepspec": ExportConfig(format="deepspec"),
    "push b r": PushConfig(),
    "report b --out o": ReportConfig(),
    "search b q": SearchConfig(),
    "select b --out o --limit 3": SelectConfig(limit=3),
}


def parsed(words: list[str]) -> Any:
    """The config that a command line makes."""
    found: Any = app
    while hasattr(found, "commands"):
        found, words = found.commands[words[0]], words[1:]
    context = found.make_context("", list(words))
    [name] = [name for name, kind in found.callback.configs.items() if kind not in (Common, RunOptions)]
    return found.callback.arguments(**{key: value for key, value in context.params.items() if key != "help"})[name]


def put(config: Any, name: str, value: Any) -> Any:
    """The config with another value of a field, its own or of a config inside it."""
    if isinstance(config, tuple):
        return tuple(put(one, name, value) for one in config)
    if not dataclasses.is_dataclass(config):
        return config
    names = {field.name for field in dataclasses.fields(config)}
    if name in names and mark(hints_of(type(config))[name], Flag, Flag("--")).name:
        return dataclasses.replace(config, **{name: value})  # type: ignore[type-var]
    return dataclasses.replace(config, **{one: put(getattr(config, one), name, value) for one in names})  # type: ignore[type-var]


WORDS = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)


def drawn(draw: st.DrawFn, hint: Any) -> Any:
    """A value that a field takes."""
    kind = core_of(hint)
    [bound, *_] = [*(one for one in marks(hint) if isinstance(one, Range)), Range()]
    if get_origin(kind) is Literal:
        return draw(st.sampled_from(get_args(kind)))
    if get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,):
        return tuple(drawn(draw, get_args(kind)[0]) for _ in range(draw(st.integers(1, 3))))
    if get_origin(kind) is tuple:
        return tuple(drawn(draw, arg) for arg in get_args(kind))
    if kind is int:
        least = -5 if bound.least is None else int(bound.least)
        return draw(st.integers(least, least + 50 if bound.most is None else int(bound.most)))
    if kind is float:
        return draw(st.sampled_from([0.25, 0.5, 0.75]))
    return draw(st.booleans() if kind is bool else WORDS)


def written(option: Option, value: Any) -> list[str]:
    """A value as words of a command line."""
    kind = core_of(option.hint)
    if kind is bool:
        return [option.flag] if value is not option.default else []
    if get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,):
        if core_of(get_args(kind)[0]) in (int, float):
            return [f"{option.flag}={','.join(map(str, value))}"]
        return [f"{option.flag}={'='.join(one) if isinstance(one, tuple) else one}" for one in value]
    if isinstance(value, tuple):
        return [f"{option.flag}={(':' if option.name == 'rows' else '/').join(map(str, value))}"]
    return [f"{option.flag}={value}"]


@pytest.mark.slow
@pytest.mark.parametrize("line", MADE)
@settings(deadline=None)
@given(st.data())
def test_a_config_of_the_command_line_is_that_of_python(line: str, data: st.DataObject) -> None:
    expected = MADE[line]
    assert parsed(line.split()) == expected
    known = {name: option for name, option in options_of(type(expected)).items() if option.help.read is None}
    names = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=4))
    words = line.split()
    values = {}
    for name in names:
        option = known[name]
        if option.flag in words:
            continue
        values[name] = data.draw(st.composite(drawn)(option.hint))
        words += written(option, values[name])
    refused = False
    try:
        for name, value in values.items():
            expected = put(expected, name, value)
    except InputError:
        refused = True
    if refused:
        with suppress(InputError):  # one after another is refused sooner than all at once
            parsed(words)
    else:
        assert parsed(words) == expected
