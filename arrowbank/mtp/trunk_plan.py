"""What a trunk bank is made of, and all that is fixed before the first forward pass: windows, shards, recipe, sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from arrowbank.bank.kinds.trunk import window_bytes
from arrowbank.engine.plan import BatchRules, Shard
from arrowbank.errors import InputError
from arrowbank.inputs.lines import MAX_LINE_BYTES
from arrowbank.models import ModelConfig, describe, load_tokenizer, tokenizer_fingerprint
from arrowbank.mtp.packing import HELD_OUT_EVERY, PackedSet, Windows, least_tokens, pack, shuffled
from arrowbank.mtp.trunk_records import NumberedRecords, TokenRecords, number_records
from arrowbank.progress import Progress, tell_unread
from arrowbank.settings import Count, Flag, Natural, Place, Settings, refuse_unread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from arrowbank.models import ModelInfo


METHOD = 1  # raise it when the same tokens and weights would give other bytes
SHARD_BYTES = 1 << 29
MAX_VALUES = 2**31 - 1  # of a column in one record batch
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
    budget_bytes: Annotated[Natural, Flag("--budget-gb")] | None = None
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


@dataclass
class TrunkPlan:
    """Everything that is fixed before the first forward pass. Raises InputError for a model or data that cannot be used."""

    config: TrunkConfig

    @cached_property
    def info(self) -> ModelInfo:
        """The model, as it is run: with its head. InputError where it has none, a window is too long for it, or it has fewer
        tokens or layers than are asked for."""
        from arrowbank.mtp.trunk_passes import require_causal

        info, config = replace(describe(self.config.model), backbone="outer"), self.config
        require_causal(config.model, info)
        if info.max_positions is not None and config.window > info.max_positions:
            raise InputError(
                f"--window {config.window}: model {info.model!r} has {info.max_positions} positions. Give that or less."
            )
        if config.topk > info.vocab_size:
            raise InputError(
                f"--topk {config.topk}: model {info.model!r} has a vocabulary of {info.vocab_size}. Give that or less."
            )
        if config.layers and config.layers[-1] >= info.num_layers:
            raise InputError(
                f"--layers {','.join(map(str, config.layers))}: there is no block {config.layers[-1]}, {info.model!r} has "
                f"{info.num_layers}; expected ids from 0 to {info.num_layers - 1}, or −1 for the embeddings."
            )
        if config.window * max(info.hidden_size, config.topk) > MAX_VALUES:
            raise InputError(f"--window {config.window}: more than a record batch holds at {info.hidden_size} values a token.")
        return info

    @cached_property
    def pad_id(self) -> int:
        """What fills a short window."""
        from arrowbank.mtp.trunk_passes import end_of_text

        return end_of_text(self.config.trunk_model, self.info)

    @cached_property
    def hidden_dtype(self) -> str:
        from arrowbank.mtp.trunk_passes import stored_dtype

        return stored_dtype(self.info)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """What makes ids of texts; None where the model has no tokenizer and none is given (the data must be ids then)."""
        name, code = self.config.tokenizer, self.config.model.trust_remote_code
        if name is None and not any((self.info.folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
            return None
        return load_tokenizer(name or self.config.model.model, trust_remote_code=code)

    @cached_property
    def windows(self) -> Windows:
        """The packed windows. InputError for data that cannot be read, or give too few windows."""
        windows = Windows([self._pack(one) for one in self.config.data], self.config.window, self.config.hold_all)
        if all(source.are_rows for source in self._sources.values()):
            refuse_unread("banks and tables, which have no lines", self.config, ["on_bad_line", "max_line_bytes"])
        if not any(source.text_field for source in self._sources.values()):
            refuse_unread("data without named fields (banks, .txt)", self.config, ["text_field"])
        if "tokenizer" not in self.__dict__:
            refuse_unread("data of token ids", self.config, ["tokenizer"])
        if len(windows) < HELD_OUT_EVERY and not self.config.hold_all:
            each = ", ".join(f"{one.name} {len(one.lengths)}" for one in windows.sets)
            raise InputError(
                f"too few windows: {len(windows)} ({each}) of {self.config.window} tokens; expected at least {HELD_OUT_EVERY}, "
                "since every tenth is held out to measure on. Give more --source or --tokens, a smaller --window, or --hold-all "
                "for a bank of evaluation only."
            )
        return windows

    @cached_property
    def _sources(self) -> dict[TrunkData, NumberedRecords]:
        config = self.config
        policy = {"max_line_bytes": config.max_line_bytes, "skip_bad_lines": config.on_bad_line == "skip"}
        return {data: number_records(data.path, config.text_field or TEXT_FIELD, **policy) for data in config.data}

    def tell_unread(self, progress: Progress) -> None:
        """Name what the data hold and nobody has read."""
        for data in self.config.data:
            tell_unread(progress, f"{data.name} ({data.path})", fields=self._sources[data].unread)

    def _pack(self, data: TrunkData) -> PackedSet:
        source = self._sources[data]
        records = TokenRecords(source, f"{data.name} ({data.path})", self.info.vocab_size, lambda: self.tokenizer)
        packed = pack(
            data.name,
            records.in_order(shuffled(len(source))),
            tokens=data.tokens or self.config.tokens or TOKENS,
            window=self.config.window,
            chain=self.config.chain,
        )
        if not packed.lengths:
            raise InputError(
                f"{records.place}: too few windows: its {len(source):,} records give none of {self.config.window} tokens, nor a "
                f"short one of at least {least_tokens(self.config.chain)} (16 and the chain). Give more data or a smaller --window."
            )
        return packed

    @property
    def shard_bytes(self) -> int:
        return self.config.max_shard_bytes or SHARD_BYTES

    def row_bytes(self, length: int) -> int:
        """Bytes of a window of `length` real tokens."""
        return window_bytes(self.config.window, length, self.config.topk, self.info.hidden_size)

    @cached_property
    def shards(self) -> list[Shard]:
        widest = max(self.info.hidden_size, self.config.topk)
        return cut_shards(self.windows.lengths.tolist(), self.row_bytes, self.shard_bytes, widest)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Everything that decides the bytes: the weights, T, k, every token id. Hashed into the plan digest."""
        config = self.config
        sets, start = {}, 0
        for one in self.windows.sets:
            sha256 = hashlib.sha256(one.ids.astype("<i4").tobytes()).hexdigest()
            sets[one.name] = {"first": start, "windows": len(one.lengths), "tokens": len(one.ids), "ids_sha256": sha256}
            start += len(one.lengths)
        return {
            "method": METHOD,
            "model": model_recipe(self.info),
            "window": config.window,
            "topk": config.topk,
            "hidden_norm": config.last_hidden_norm,
            "hidden_dtype": self.hidden_dtype,
            "hold_all": config.hold_all,
            "pad_id": self.pad_id,
            "sets": sets,
            "batches": batch_recipe(config.rules),
            "shard_bytes": self.shard_bytes,
        }

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The fields that are known before the work: all but the files."""
        config, info, windows = self.config, self.info, self.windows
        texts = self.__dict__.get("tokenizer")  # only where it was used
        return {
            "text_count": len(windows),
            "model_path": info.model,
            "model_fingerprint": info.fingerprint,
            "tokenizer_fingerprint": None if texts is None else tokenizer_fingerprint(texts),
            "architecture": info.architecture,
            "dtype": info.dtype,
            "quantisation": info.quantisation,
            "vocab_size": info.vocab_size,
            "hidden_size": info.hidden_size,
            "num_hidden_layers": info.num_layers,
            "hidden_norm": config.last_hidden_norm,
            "hidden_dtype": self.hidden_dtype,
            "window": config.window,
            "topk": config.topk,
            "chain": config.chain,
            "hold_all": config.hold_all,
            "pad_id": self.pad_id,
            "sets": self.recipe["sets"],
            "counts": {
                "windows": len(windows),
                "held_out": int(windows.held_out.sum()),
                "tokens": int(windows.lengths.sum()),
                "bad_lines": sum(source.bad_lines for source in self._sources.values()),
            },
        }


def cut_shards(lengths: list[int], row_bytes: Any, shard_bytes: int, widest: int) -> list[Shard]:
    """Contiguous shards of at most `shard_bytes` and of as many values a column as a record batch holds; at least one row each.

    `row_bytes` tells the bytes of a row by its length; `widest` is how many values a token has in the largest column.
    """
    shards: list[Shard] = []
    start, size, tokens = 0, 0, 0
    for row, length in enumerate(lengths):
        more = row_bytes(length)
        if row > start and (size + more > shard_bytes or (tokens + length) * widest > MAX_VALUES):
            shards.append(Shard(len(shards), start, row))
            start, size, tokens = row, 0, 0
        size, tokens = size + more, tokens + length
    return [*shards, Shard(len(shards), start, len(lengths))]


def model_recipe(info: ModelInfo) -> dict[str, Any]:
    """All of the model that decides values."""
    return {name: value for name, value in info.recipe().items() if name not in ("layer", "pooling", "backbone")}


def batch_recipe(rules: BatchRules) -> dict[str, Any]:
    """How windows are batched."""
    return {"max_batch": rules.max_batch, "token_budget": rules.token_budget, "grouping": "exact_token_length"}
