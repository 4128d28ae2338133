"""The options of `trunk build`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arrowbank.cli import options as o
from arrowbank.cli.options import BUILD, RUN, MaxLineBytes, ModelOptions, OnBadLine, Tokenizer, layer_list, make
from arrowbank.cli.show import finish, progress_for, show_estimate, unfinished
from arrowbank.cli.spread import spread
from arrowbank.settings import Old

if TYPE_CHECKING:
    from arrowbank.mtp.trunk_plan import TrunkConfig, TrunkData


_build = partial(typer.Option, rich_help_panel=BUILD)
_run = partial(typer.Option, rich_help_panel=RUN)


@dataclass(kw_only=True)
class TrunkOptions(ModelOptions):
    """What decides a trunk bank, and where the model runs."""

    source: Annotated[
        list[str],
        _build(
            "--source",
            metavar="NAME=PATH@TOKENS",
            help="A set; repeat it. A bank, file, folder, saved dataset or address; @TOKENS: taken instead of --tokens.",
        ),
        Old("--data"),
    ]
    window: Annotated[int, _build("--window", help="Tokens a window.")] = 2048
    topk: Annotated[int, _build("--topk", help="Most likely next tokens kept a row.")] = 64
    tokens: Annotated[
        int | None, _build("--tokens", show_default="393216", help="Tokens taken of a set without @TOKENS of its own.")
    ] = None
    chain: Annotated[int, _build("--chain", help="Steps that the draft looks ahead (for the last window).")] = 3
    last_hidden_norm: Annotated[
        str,
        _build("--last-hidden-norm", metavar="post|pre", help="Hidden states: after or before the final norm."),
        Old("--hidden"),
    ] = "post"
    layers: Annotated[
        str | None,
        _build("--layers", metavar="LIST", help="Layers of held-out windows, into DIR-taps: 1,9,17."),
        Old("--taps"),
    ] = None
    hold_all: Annotated[bool, _build("--hold-all", help="Hold every window out: for evaluation only.")] = False
    tokenizer: Tokenizer = None
    text_field: Annotated[
        str | None, _build("--text-field", metavar="NAME", show_default="text", help="Where texts are in .jsonl, datasets.")
    ] = None
    max_batch: Annotated[
        int, _build("--max-batch", help="Windows a forward pass; 1: a row depends on no other window, to the bit.")
    ] = 1
    token_budget: Annotated[int, _build("--token-budget", help="Tokens a forward pass.")] = 8192
    max_shard_bytes: Annotated[int | None, _build("--max-shard-bytes", help="Default: 512 MiB.")] = None
    on_bad_line: OnBadLine = None
    max_line_bytes: MaxLineBytes = None

    def config(self, *, trust_remote_code: bool) -> TrunkConfig:
        from arrowbank.engine.plan import BatchRules
        from arrowbank.mtp.trunk_plan import TrunkConfig

        return make(
            TrunkConfig,
            self,
            model=self.model_config(trust_remote_code=trust_remote_code),
            data=data_sets(self.source),
            layers=layer_list(self.layers) or (),
            rules=make(BatchRules, self),
        )


def data_sets(values: list[str]) -> tuple[TrunkData, ...]:
    """NAME=PATH@TOKENS values (also NAME@TOKENS=PATH, or a path alone) as data sets."""
    from arrowbank.inputs.sources import named_source
    from arrowbank.mtp.trunk_plan import TrunkData

    found = []
    for value in values:
        whole, of_path = _capped(value)
        given_name, path = named_source(whole)
        name, of_name = _capped(given_name)
        found.append(TrunkData(name, path, of_name if of_path is None else of_path))
    return tuple(found)


def _capped(value: str) -> tuple[str, int | None]:
    """VALUE@TOKENS in two; a value without a number behind its last @ is whole."""
    front, _, number = value.rpartition("@")
    return (front, int(number)) if front and number.isdecimal() else (value, None)


@spread
def build(
    out: o.Out,
    what: TrunkOptions,
    how: o.RunOptions,
    common: o.Common,
    trust_remote_code: o.TrustRemoteCode = False,
) -> None:
    """Run a model over packed windows; keep its hidden states and most likely next tokens. The same command again goes on.

    Example: arrowbank trunk build --model Qwen/Qwen3-Next-80B-A3B-Instruct --source code=tokens --out trunk
    """
    from arrowbank.mtp.trunk_build import build_trunk, estimate_trunk

    config, options, progress = what.config(trust_remote_code=trust_remote_code), how.options(), progress_for(common.json)
    if how.dry_run:
        show_estimate(estimate_trunk(config, out, options=options, progress=progress), common.json)
        return
    manifest = build_trunk(config, out, options=options, progress=progress)
    finish(common.json, manifest, _made(out, manifest, taps=bool(config.layers)))


def _made(out: str, manifest: dict[str, Any], *, taps: bool) -> str:
    if not manifest["complete"]:
        return unfinished(out, manifest)
    counts = manifest["counts"]
    beside = f" Taps of the held-out ones: {out}-taps." if taps else ""
    return (
        f"{out}: {counts['windows']:,} windows of {manifest['window']:,} tokens, {counts['held_out']:,} held out, "
        f"{counts['tokens']:,} tokens.{beside}\nProve it: arrowbank verify {out}"
    )
