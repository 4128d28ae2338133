"""The options of an arm, and everything about them that can be refused without reading a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from arrowbank.errors import InputError
from arrowbank.inputs.lines import MAX_LINE_BYTES, MaxLineBytes, OnBadLine, TextField
from arrowbank.settings import Count, Flag, Group, Help, Natural, Old, Place, Settings, refuse_unread

ArmName = Literal["a", "b", "c"]
DTYPES = {"uint16": 1 << 16, "uint32": 1 << 32}
PAD_TAIL = 4  # a loader shifts labels by one: an answer stays clear of an example's end
SHARD_TOKENS = 100_000_000  # the loader behind the raw format ignores what is past it
SHARD_ROWS = 8192  # of an Arrow shard of short examples: what a worker knows of each takes memory, too
# the options that matched arms must share, by their names here and on the command line
SHARED = {
    "length": "--length",
    "examples": "--examples",
    "triples": "--triples",
    "key_len": "--key-len",
    "val_len": "--val-len",
    "alphabet": "--alphabet",
    "decoys": "--decoys",
    "min_distance": "--min-distance",
    "vocab": "--vocab",
    "seed": "--seed",
    "split": "--split",
    "dtype": "--dtype",
    "fillers": "--filler",
}


PLANTED = Group("What is planted")
Length = Annotated[Count, Help("Tokens of an example."), PLANTED]
KeyLen = Annotated[Count, Help("Tokens of a key."), PLANTED]
ValLen = Annotated[Count, Help("Tokens of a value."), PLANTED]
Alphabet = Annotated[Count, Help("Keys and values consist of ids below it."), PLANTED]
Vocab = Annotated[Count, Help("All ids are below it."), PLANTED]
IdType = Annotated[Literal["uint16", "uint32"], Help("Integer type of the token ids on disk."), PLANTED]
FillerTokenizer = Annotated[Place, Help("For a filler of texts.", "M"), PLANTED]
FillerField = Annotated[TextField, PLANTED]
FillerBadLine = Annotated[OnBadLine, PLANTED]


@dataclass(frozen=True, kw_only=True)
class FillerTexts(Settings):
    """How a filler of texts becomes ids, as the options of the same names say. `max_line_bytes` decides no id."""

    tokenizer: Place | None = None
    text_field: str | None = None
    on_bad_line: Literal["error", "skip"] | None = None
    max_line_bytes: Count = MAX_LINE_BYTES


READING = tuple(FillerTexts.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class In2Config(Settings):
    """One arm. Counts and lengths are in tokens.

    `raw_shards` files hold ceil(examples / raw_shards) examples each; fewer files are written where that many examples fill fewer.
    `shard_tokens` is what an Arrow shard may hold: what a worker has in memory, and what a crash costs.
    """

    arm: Annotated[ArmName, Help("a: no needles; b: right before the probe; c: far before it."), PLANTED]
    length: Length
    examples: Annotated[Count, Help("Number of examples."), PLANTED]
    triples: Annotated[Count, Help("Needles, probes and answers per example."), PLANTED] = 64
    key_len: KeyLen = 4
    val_len: ValLen = 8
    alphabet: Alphabet = 512
    decoys: Annotated[Natural, Help("Never asked for. Default: a quarter of the triples."), PLANTED] | None = None
    min_distance: Annotated[Natural, Help("Arm c: least number of tokens between needle and probe."), PLANTED] = 64
    vocab: Vocab = 50304
    seed: Annotated[Natural, Help("The same for all arms that are compared."), PLANTED] = 0
    split: Annotated[Literal["train", "val"], Help("In the files' names; train takes no validation file."), PLANTED] = "train"
    raw_shards: (
        Annotated[Count, Help("Number of raw shards; at most 100,000,000 tokens each.", default="1"), PLANTED] | None
    ) = None
    global_batch: (
        Annotated[
            Count, Help("The loader's batch x ranks: the examples of a raw shard must be a multiple."), Old("--align"), PLANTED
        ]
        | None
    ) = None
    unique_keys: Annotated[bool, Help("A key twice in an example, or in its filler, is an error."), PLANTED] = False
    dtype: IdType = "uint16"
    mirror: Annotated[bool, Help("Leave out the raw shards and their manifest."), PLANTED] = True
    tokenizer: FillerTokenizer | None = None
    text_field: FillerField | None = None
    on_bad_line: FillerBadLine | None = None
    max_line_bytes: MaxLineBytes = MAX_LINE_BYTES
    shard_tokens: Annotated[Count, Flag("")] = 1 << 23

    def check(self) -> None:
        if sys.byteorder != "little":
            raise InputError("this machine is big-endian, the files are little-endian. Build them on another one.")
        check_vocab(self.alphabet, self.vocab, self.dtype)
        if not self.mirror:
            refuse_unread("--no-mirror, which writes no raw shards", self, ["raw_shards"])
        if self.arm != "a":
            self._check_room()
        self._check_examples()

    def _check_room(self) -> None:
        room = self.last_site - self.first_site
        if room <= 0:
            least = self.first_site + self.span + PAD_TAIL + 1
            raise InputError(
                f"--length {self.length} is too small: sites lie from {self.first_site} (span and --min-distance) to "
                f"{self.last_site} (length − {PAD_TAIL} − span). Give at least {least}."
            )
        if (fit := room // (2 * self.span) + 1) < self.triples:
            raise InputError(
                f"--length {self.length} is too small for {self.triples} triples: at most {fit} sites lie {2 * self.span} tokens "
                "apart. Give fewer --triples or a larger --length."
            )

    def _check_examples(self) -> None:
        if self.global_batch and self.per_shard % self.global_batch:  # the last of several raw shards may be smaller
            whole = self.global_batch * len(self.shard_examples)
            below = self.examples - self.examples % whole
            nearest = (below or below + whole, below + (whole if below else 2 * whole))
            each = (
                f", {self.per_shard} in each of {len(self.shard_examples)} raw shards," if len(self.shard_examples) > 1 else ""
            )
            raise InputError(
                f"--examples {self.examples}{each} is not a multiple of --global-batch {self.global_batch}: a loader would drop or mix "
                f"the rest. The nearest that are: {nearest[0]} and {nearest[1]}."
            )
        if self.length > SHARD_TOKENS:
            raise InputError(f"--length {self.length} is more than a shard may hold ({SHARD_TOKENS:,} tokens).")
        if self.mirror and self.per_shard * self.length > SHARD_TOKENS:
            most = SHARD_TOKENS // self.length
            raise InputError(
                f"--raw-shards {self.raw_files} puts {self.per_shard * self.length:,} tokens into a shard, a loader reads the first "
                f"{SHARD_TOKENS:,}. Give at least --raw-shards {-(-self.examples // most)}."
            )

    @property
    def texts(self) -> FillerTexts:
        """How fillers of texts are read."""
        return FillerTexts(**{name: getattr(self, name) for name in READING})

    @property
    def raw_files(self) -> int:
        """`raw_shards`, its default in place."""
        return self.raw_shards or 1

    @property
    def span(self) -> int:
        """Tokens of a key with its value."""
        return self.key_len + self.val_len

    @property
    def decoy_count(self) -> int:
        return self.triples // 4 if self.decoys is None else self.decoys

    @property
    def first_site(self) -> int:
        return self.span + self.min_distance

    @property
    def last_site(self) -> int:
        return self.length - PAD_TAIL - self.span

    @property
    def rows_a_shard(self) -> int:
        """Examples in an Arrow shard."""
        return max(1, min(self.shard_tokens // self.length, SHARD_ROWS))

    @property
    def arrow_shards(self) -> int:
        return -(-self.examples // self.rows_a_shard)

    @property
    def per_shard(self) -> int:
        """Examples in a raw shard; the last may have fewer."""
        return -(-self.examples // self.raw_files)

    @property
    def examples_lost(self) -> int:
        """Of the last raw shard, those that are no whole global batch: a loader drops them."""
        return len(self.shard_examples[-1]) % self.global_batch if self.global_batch and self.mirror else 0

    @property
    def shard_examples(self) -> list[range]:
        """The examples of each raw shard."""
        starts = range(0, self.examples, self.per_shard)
        return [range(start, min(start + self.per_shard, self.examples)) for start in starts]

    def recipe(self) -> dict[str, Any]:
        """The options that decide the files; what decides the ids of fillers is in their digests."""
        options = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("global_batch", "raw_shards", *READING)
        }
        return {**options, "decoys": self.decoy_count, "shards": self.raw_files}


def check_vocab(alphabet: int, vocab: int, dtype: str) -> None:
    """InputError where keys would be no tokens, or ids do not fit the dtype."""
    if alphabet > vocab:
        raise InputError(
            f"--alphabet {alphabet} is larger than --vocab {vocab}: keys and values would be no tokens. Give at most {vocab}."
        )
    if vocab > DTYPES[dtype]:
        larger = " Give --dtype uint32." if dtype == "uint16" else ""
        raise InputError(f"--vocab {vocab} does not fit {dtype} (below {DTYPES[dtype]:,}).{larger}")
