"""The options of `trunk build`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from arrowbank.cli.options import BUILD, RUN, MaxLineBytes, ModelOptions, Tokenizer, billions, layer_list, make, pairs

if TYPE_CHECKING:
    from arrowbank.trunk.planning import TrunkConfig, TrunkData

_build = partial(typer.Option, rich_help_panel=BUILD)
_run = partial(typer.Option, rich_help_panel=RUN)


@dataclass(kw_only=True)
class TrunkOptions(ModelOptions):
    """What decides a trunk bank, and where the model runs."""

    data: Annotated[
        list[str],
        _build(
            "--data",
            metavar="NAME=BANK@TOKENS",
            help="A set; repeat it. A token or texts bank, a saved dataset, .jsonl, .txt; @TOKENS: taken instead of --tokens.",
        ),
    ]
    window: Annotated[int, _build("--window", help="Tokens a window.")] = 2048
    topk: Annotated[int, _build("--topk", help="Most likely next tokens kept a row.")] = 64
    tokens: Annotated[
        int | None, _build("--tokens", show_default="393216", help="Tokens taken of a set without @TOKENS of its own.")
    ] = None
    chain: Annotated[int, _build("--chain", help="Steps that the draft looks ahead (for the last window).")] = 3
    hidden: Annotated[str, _build("--hidden", metavar="post|pre", help="Hidden states: after or before the final norm.")] = (
        "post"
    )
    taps: Annotated[str | None, _build("--taps", metavar="LIST", help="Layers of held-out windows, into DIR-taps: 1,9,17.")] = (
        None
    )
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
    budget_gb: Annotated[float | None, _run("--budget-gb", help="Refuse to start if it would take more (10^9 bytes).")] = None
    max_line_bytes: MaxLineBytes = None

    def config(self, *, trust_remote_code: bool) -> TrunkConfig:
        from arrowbank.plan import BatchRules
        from arrowbank.trunk.planning import TrunkConfig

        return make(
            TrunkConfig,
            self,
            model=self.model_config(trust_remote_code=trust_remote_code),
            data=data_sets(self.data),
            taps=layer_list(self.taps, "--taps"),
            rules=make(BatchRules, self),
            budget_bytes=billions("--budget-gb", self.budget_gb),
        )


def data_sets(values: list[str]) -> tuple[TrunkData, ...]:
    """NAME=BANK@TOKENS values (also NAME@TOKENS=BANK) as data sets."""
    from arrowbank.trunk.planning import TrunkData

    found = []
    for given_name, given_path in pairs("--data", values):
        name, of_name = _capped(given_name)
        path, of_path = _capped(given_path)
        found.append(TrunkData(name, path, of_name if of_path is None else of_path))
    return tuple(found)


def _capped(value: str) -> tuple[str, int | None]:
    """VALUE@TOKENS in two; a value without a number behind its last @ is whole."""
    front, _, number = value.rpartition("@")
    return (front, int(number)) if front and number.isdecimal() else (value, None)
