"""The options of a trunk bank, and what it has in common with the bank of its taps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from arrowbank.engine.plan import BatchRules
from arrowbank.errors import InputError
from arrowbank.inputs.lines import MAX_LINE_BYTES, MaxLineBytes, OnBadLine, TextField
from arrowbank.inputs.sources import named_source
from arrowbank.models import ModelConfig
from arrowbank.settings import Count, Flag, Help, Old, Part, Place, Settings, refuse_unread

if TYPE_CHECKING:
    from arrowbank.models import ModelInfo


METHOD = 1  # raise it when the same tokens and weights would give other bytes
TOKENS = 393_216
TEXT_FIELD = "text"
SHARD_OVERHEAD = 2000  # bytes that a shard takes beside its values: an Arrow stream's own, and its lines in other files
FILES_OVERHEAD = 4300  # manifest, card, column types


@dataclass(frozen=True)
class TrunkData(Settings):
    """A data set: its name, where it lies, and how many tokens are taken of it (None: as many as of the others)."""

    name: Annotated[str, Flag("--source")]
    path: Annotated[str | Path, Flag("--source")]
    tokens: Annotated[Count, Flag("--source")] | None = None

    def check(self) -> None:
        if not self.name or not str(self.path):
            raise InputError(f"--source {self.name}={self.path}: expected NAME=PATH, as in --source code=tokens.")


def data_set(value: str) -> TrunkData:
    """NAME=PATH@TOKENS (also NAME@TOKENS=PATH, or a path alone) as a data set."""
    whole, of_path = _capped(value)
    given_name, path = named_source(whole)
    name, of_name = _capped(given_name)
    return TrunkData(name, path, of_name if of_path is None else of_path)


def _capped(value: str) -> tuple[str, int | None]:
    """VALUE@TOKENS in two; a value without a number behind its last @ is whole."""
    front, _, number = value.rpartition("@")
    return (front, int(number)) if front and number.isdecimal() else (value, None)


@dataclass(frozen=True, kw_only=True)
class TrunkConfig(Settings):
    """What is computed of which windows. Raises InputError for a value that no bank could take.

    `sources` are the sets, in the order of the bank's windows. A short last window is kept if it has 16 tokens more than `chain`.
    """

    model: Annotated[ModelConfig, Part(without=("pooling", "layer", "backbone"))]
    sources: Annotated[
        tuple[TrunkData, ...],
        Flag("--source"),
        Old("--data"),
        Help(
            "A set; repeat it. A bank, file, folder or saved dataset; @TOKENS: taken instead of --tokens.",
            "NAME=PATH@TOKENS",
            read=data_set,
        ),
    ]
    window: Annotated[Count, Help("Tokens per window.")] = 2048
    topk: Annotated[Count, Help("Most likely next tokens kept per row.")] = 64
    tokens: Annotated[Count, Help("Tokens taken of a set without @TOKENS of its own.", default="393216")] | None = None
    chain: Annotated[Count, Help("Steps that the draft looks ahead (for the last window).")] = 3
    last_hidden_norm: Annotated[
        Literal["post", "pre"], Help("Hidden states: after or before the final norm."), Old("--hidden")
    ] = "post"
    layers: Annotated[
        tuple[int, ...],
        Help("Blocks whose output is kept of held-out windows, into DIR-taps: 1,9,17.", example="1,9,17"),
        Old("--taps"),
    ] = ()
    hold_all: Annotated[bool, Help("Hold every window out: for evaluation only.")] = False
    tokenizer: Annotated[Place, Help("Of sources that are texts. Default: the model's.", "M")] | None = None
    text_field: TextField | None = None
    rules: Annotated[
        BatchRules,
        Part(help={"max_batch": Help("Windows per forward pass; 1: a row depends on no other window, to the bit.")}),
    ] = field(default_factory=lambda: BatchRules(max_batch=1))
    max_shard_bytes: Annotated[Count, Help("Largest size of a shard. Default: 512 MiB.")] | None = None
    max_line_bytes: MaxLineBytes = MAX_LINE_BYTES
    on_bad_line: OnBadLine | None = None

    def check(self) -> None:
        names = [one.name for one in self.sources]
        if not names or len(set(names)) < len(names):
            raise InputError(f"the data sets are named {', '.join(names) or 'nothing'}; expected at least one, each name once.")
        if list(self.layers) != sorted(set(self.layers)) or min(self.layers, default=0) < -1:
            raise InputError(
                f"--layers {','.join(map(str, self.layers))}: expected ascending ids of decoder blocks, each once, −1 for the "
                "embeddings, as in --layers 1,9,17."
            )
        if all(one.tokens is not None for one in self.sources):
            refuse_unread("data sets that all have @TOKENS of their own", self, ["tokens"])

    @property
    def trunk_model(self) -> ModelConfig:
        """The model as it is loaded: with its head."""
        return replace(self.model, backbone="outer")


def model_recipe(info: ModelInfo) -> dict[str, Any]:
    """All of the model that decides values."""
    return {name: value for name, value in info.recipe().items() if name not in ("layer", "pooling", "backbone")}
