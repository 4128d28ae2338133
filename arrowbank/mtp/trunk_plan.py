"""The options of a trunk bank, and what it has in common with the bank of its taps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from arrowbank.engine.plan import BatchRules
from arrowbank.errors import InputError
from arrowbank.inputs.lines import MAX_LINE_BYTES
from arrowbank.models import ModelConfig
from arrowbank.settings import Count, Flag, Place, Settings, refuse_unread

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


@dataclass(frozen=True, kw_only=True)
class TrunkConfig(Settings):
    """What is computed of which windows. Raises InputError for a value that no bank could take.

    model      layer, pooling and backbone stay at their defaults: a trunk is the whole model
    data       the sets, in the order of the bank's windows
    window     T, tokens a window
    topk       k, next tokens kept a row
    tokens     taken of a set that does not say (None: 393,216)
    chain      steps that the draft will look ahead: a short last window is kept if it has 16 tokens more
    last_hidden_norm  "post" or "pre": hidden states after or before the model's final norm
    layers     blocks whose output is kept of held-out windows, in a bank of their own; i is what block i puts out
    hold_all   every window is held out: for evaluation only
    tokenizer  for data that are texts; default the model's
    text_field where the text is in a line of .jsonl or a row of a saved dataset (None: "text")
    max_line_bytes  a longer line of the data is an error; it decides no row
    on_bad_line     what to do with lines that are no JSON object in UTF-8 (None: "error")
    rules      the batches: at most so many windows and tokens a forward pass; of one window, a row's bits are its own alone
    """

    model: ModelConfig
    data: tuple[TrunkData, ...]
    window: Count = 2048
    topk: Count = 64
    tokens: Count | None = None
    chain: Count = 3
    last_hidden_norm: Literal["post", "pre"] = "post"
    layers: tuple[int, ...] = ()
    hold_all: bool = False
    tokenizer: Place | None = None
    text_field: str | None = None
    rules: BatchRules = field(default_factory=lambda: BatchRules(max_batch=1))
    max_shard_bytes: Count | None = None
    max_line_bytes: Count = MAX_LINE_BYTES
    on_bad_line: Literal["error", "skip"] | None = None

    def check(self) -> None:
        names = [one.name for one in self.data]
        if not names or len(set(names)) < len(names):
            raise InputError(f"the data sets are named {', '.join(names) or 'nothing'}; expected at least one, each name once.")
        if list(self.layers) != sorted(set(self.layers)) or min(self.layers, default=0) < -1:
            raise InputError(
                f"--layers {','.join(map(str, self.layers))}: expected ascending ids of decoder blocks, each once, −1 for the "
                "embeddings, as in --layers 1,9,17."
            )
        if all(one.tokens is not None for one in self.data):
            refuse_unread("data sets that all have @TOKENS of their own", self, ["tokens"])
        plain = ModelConfig(model=self.model.model)
        for name in ("layer", "pooling", "backbone"):
            if getattr(self.model, name) != getattr(plain, name):
                raise InputError(
                    f"model.{name} is {getattr(self.model, name)!r}, which a trunk has no use for; expected the default, "
                    f"{getattr(plain, name)!r}. Which hidden states are kept is said by last_hidden_norm and layers."
                )

    @property
    def trunk_model(self) -> ModelConfig:
        """The model as it is loaded: with its head."""
        return replace(self.model, backbone="outer")


def model_recipe(info: ModelInfo) -> dict[str, Any]:
    """All of the model that decides values."""
    return {name: value for name, value in info.recipe().items() if name not in ("layer", "pooling", "backbone")}
