"""Feature banks: for each text a vector, with a look-up by text and a mirror for trainers that map a matrix."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.checks import Check, attempt, found_wrong
from arrowbank.bank.columns import ShardedColumn, fixed_bytes, fixed_lists, values_of
from arrowbank.bank.keys import KEY_FILE, SHA1_BYTES, Digests, SortedKeys, sorted_keys, text_keys
from arrowbank.bank.kinds import (
    ABSENT,
    BINARY,
    FOLDER,
    INT,
    LOAD,
    STRING,
    TEXT,
    Description,
    Field,
    Kind,
    Types,
    equal,
    fixed,
    register,
)
from arrowbank.bank.kinds.texts_bank import check_keys, check_unique, value_counts
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest, Width, read_json
from arrowbank.bank.mapped import map_npy
from arrowbank.bank.mirror import INDEX_ENTRY_BYTES, INDEX_FILE, MATRIX_FILE, TEXTS_FILE, mirror_fields
from arrowbank.bank.reader import Bank
from arrowbank.bank.refusals import raise_refusal
from arrowbank.errors import CorruptBank, InputError
from arrowbank.settings import checked

if TYPE_CHECKING:
    from arrowbank.bank.torch_rows import TorchVectors


# float16 keeps 11 bits: each of D rounded components is off by at most 2^-12 of itself, and so is the norm
NORM_TOLERANCE = 2.0**-11
MATRIX = (
    f'from arrowbank import open_bank\n\nbank = open_bank("{FOLDER}")\n'
    'row = bank.rows(["a text"])  # −1 where it is absent\n'
    "matrix = bank.matrix  # [N, D] float16, memory-mapped"
)


class Encoding(msgspec.Struct, kw_only=True):
    """How vectors were computed, where the manifest says it."""

    normalize: bool
    pooling: str | None = None
    layer: Any = None
    dtype: str | None = None
    quantisation: Any = None
    dim: Width | None = None


class BatchSizes(msgspec.Struct, kw_only=True):
    """Which texts went through the model together."""

    max_batch: Width
    token_budget: Width


class FeatureRecipe(msgspec.Struct, kw_only=True):
    """What of the recipe readers use."""

    model: dict[str, Any] | None = None
    batches: BatchSizes | None = None


class FeatureManifest(BankManifest, kw_only=True):
    """`max_key_tokens` is how many tokens a text has at most; `bank`, `index` and `texts` are the files of the mirror."""

    hidden_size: Width
    model_path: str
    max_key_tokens: Width
    encoding: Encoding
    counts: dict[str, Any] | None = None
    engine: dict[str, Any] | None = None
    tokenizer: str | None = None
    special_tokens: bool | None = None
    prompt: str | None = None
    prompts: dict[str, str] | None = None
    effective_recipe: str | None = None
    encoded_rows: Count | None = None
    bank: str | None = None


def _check_vectors(bank: FeatureBank) -> Check:
    """Finite, not zero, and of norm 1 where the bank says so."""
    import torch

    normalized = bool(bank.manifest.recipe["normalize"])
    wrong: list[str] = []
    low, high = np.inf, 0.0
    for row, batch in bank.numbered_shards():
        vectors = fixed_lists(batch.column("features"))
        norms = torch.linalg.vector_norm(torch.tensor(vectors).float(), dim=1).numpy()
        bad = ~np.isfinite(norms) | (norms == 0)
        if normalized:
            bad |= np.abs(norms - 1) > NORM_TOLERANCE
        wrong += [f"row {row + at} (norm {norms[at]:.4g})" for at in np.flatnonzero(bad)[:3]]
        low, high = min(low, float(norms.min())), max(high, float(norms.max()))
    return found_wrong("vectors", wrong, f"finite, norms {low:.5f} to {high:.5f}", "not finite, zero, or of a wrong norm:")


def check_look_up(bank: KeyedBank) -> Check:
    digests = np.concatenate([fixed_bytes(batch.column("sha1"), SHA1_BYTES) for batch in bank.shards()])
    same = np.array_equal(bank.key_table, sorted_keys(digests))
    return Check("look-up", same, f"{KEY_FILE} {'finds every text' if same else 'does not fit the sha1 column'}")


def _check_mirror(bank: FeatureBank) -> Check:
    if MATRIX_FILE not in bank.entries:
        return Check("mirror", True, "none (built with --no-mirror)")
    files: dict[str, Callable[[FeatureBank], Iterator[str]]] = {MATRIX_FILE: _matrix, INDEX_FILE: _index, TEXTS_FILE: _texts}
    wrong: list[str] = []
    for name, differences in files.items():
        if name not in bank.entries:  # see `files_beside`
            continue
        with attempt(bank.folder / name) as failures:
            wrong += list(islice(differences(bank), 1))
        wrong += failures
    return found_wrong("mirror", wrong, "equal to the Arrow shards", "differs from the Arrow shards:")


def _matrix(bank: FeatureBank) -> Iterator[str]:
    """Where the matrix differs from the shards."""
    matrix = bank.matrix
    for row, batch in bank.numbered_shards():
        part = fixed_lists(batch.column("features"))
        if not np.array_equal(_bits(matrix[row : row + len(part)]), _bits(part)):
            yield f"{MATRIX_FILE} from row {row}"


def _bits(vectors: npt.NDArray[np.float16]) -> npt.NDArray[np.uint16]:
    return vectors.view(np.uint16)


def _index(bank: FeatureBank) -> Iterator[str]:
    with bank.opening(INDEX_FILE) as path:
        index = read_json(path, max_bytes=(len(bank) + 1) * INDEX_ENTRY_BYTES)
    keys = [key.hex() for batch in bank.shards() for key in batch.column("sha1").to_pylist()]
    if not isinstance(index, dict) or list(index) != keys or list(index.values()) != list(range(len(keys))):
        yield INDEX_FILE


def _texts(bank: FeatureBank) -> Iterator[str]:
    texts = (text for batch in bank.shards() for text in batch.column("text").to_pylist())
    with bank.opening(TEXTS_FILE) as path, path.open("rb") as lines:
        for row, (line, text) in enumerate(zip_longest(lines, texts)):
            if line is None or text is None:
                yield f"{TEXTS_FILE} has {'fewer' if line is None else 'more'} lines than the bank has rows ({len(bank)})"
                return
            if json.loads(line) != text:
                yield f"{TEXTS_FILE} line {row + 1}"


KIND = "features"

Vectors = npt.NDArray[np.float16]


class KeyedBank(Bank):
    """A committed bank whose rows stand for texts, found by the texts' sha1 in a sorted key file."""

    @cached_property
    def digests(self) -> ShardedColumn:
        """The texts' sha1 in the Arrow shards: [n_i, 20] uint8 a shard, memory-mapped."""
        return ShardedColumn([fixed_bytes(part, SHA1_BYTES) for part in self.parts("sha1")], self.starts)

    @cached_property
    def key_table(self) -> npt.NDArray[np.uint64]:
        """The sorted key file, [2, N] uint64, memory-mapped: see `keys`."""
        return self._array(KEY_FILE, np.dtype("<u8"), (2, len(self)))

    @cached_property
    def _keys(self) -> SortedKeys:
        return SortedKeys(self.key_table, self.folder / KEY_FILE)

    def _array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """A mapped file of this bank. CorruptBank where it is not that array, or the bank changed since it was opened."""
        with self.opening(name) as path:
            try:
                mapped = map_npy(path)
            except (ValueError, OSError) as error:
                raise_refusal(error, path)
                raise CorruptBank(f"{path}: not readable as .npy ({error}). Restore it or rebuild the bank.") from None
        if mapped.dtype != dtype or mapped.shape != shape:
            raise CorruptBank(
                f"{path}: {mapped.dtype} of shape {mapped.shape}, expected {dtype} of {shape}. Restore it or rebuild the bank."
            )
        return mapped

    @checked
    def of_kind(self, kind: str) -> npt.NDArray[np.bool_]:
        """Which rows are texts of `kind`, [N]."""
        import pyarrow as pa
        import pyarrow.compute as pc

        # by way of numbers: a column of bits becomes no array without pandas
        equal = [pc.cast(pc.equal(part, kind), pa.uint8()) for part in self.parts("kind")]
        found: npt.NDArray[np.bool_] = np.concatenate([values_of(column) for column in equal]) != 0
        return found

    def find(self, digests: Digests) -> npt.NDArray[np.int64]:
        """The row of each sha1, [n, 20] uint8 → [n] int64; −1 where the bank does not have it."""
        return self._keys.find(digests, self.digests)

    @checked
    def rows(self, texts: Iterable[str]) -> npt.NDArray[np.int64]:
        """The row of each text, [n] int64; −1 where the bank does not have it. Texts are stripped as `scan` strips them."""
        return self.find(text_keys(texts))

    def rows_of_all(self, texts: Iterable[str]) -> npt.NDArray[np.int64]:
        """The row of each text, [n] int64. InputError for a text that the bank does not have."""
        texts = list(texts)
        rows = self.rows(texts)
        if (rows < 0).any():
            missing = np.flatnonzero(rows < 0)
            raise InputError(
                f"{self.folder}: {len(missing)} of {len(texts)} texts are not in this bank, "
                f"the first one {texts[missing[0]][:60]!r}. "
                "Use .rows(texts) to see which (−1), or build a bank that has them."
            )
        return rows

    def checked_rows(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """`rows` as numbers of rows of this bank. InputError for what is no row."""
        wanted = np.asarray(rows)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise InputError(f"take: rows are {wanted.dtype}; expected whole numbers. For texts use .vectors(texts).")
        if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(self):
            outside = next(int(row) for row in wanted.ravel() if not 0 <= row < len(self))
            raise InputError(
                f"take: there is no row {outside}; {self.folder} has {len(self)} rows (−1 is a text that it lacks)."
            )
        return wanted.astype(np.int64, copy=False)


class FeatureBank(KeyedBank):
    """A committed feature bank: N vectors of width D, and the texts that they stand for."""

    manifest: FeatureManifest

    def to_torch(self) -> TorchVectors:
        """The vectors as a `torch.utils.data.Dataset`: each row [D] float16."""
        from arrowbank.bank.torch_rows import TorchVectors

        return TorchVectors(self)

    @property
    def hidden_size(self) -> int:
        """D, the width of a vector."""
        return self.manifest.hidden_size

    @cached_property
    def matrix(self) -> Vectors:
        """All vectors, [N, D] float16, memory-mapped from the mirror. InputError for a bank built without one, CorruptBank where the
        file is not that array or the bank changed since it was opened."""
        if MATRIX_FILE not in self.entries:
            raise InputError(
                f"{self.folder}: built with --no-mirror, so there is no matrix to map. Use .take(rows) or .vectors(texts), "
                "which read the Arrow shards."
            )
        return self._array(MATRIX_FILE, np.dtype("<f2"), (len(self), self.hidden_size))

    @cached_property
    def features(self) -> ShardedColumn:
        """The vectors in the Arrow shards: [n_i, D] float16 a shard, memory-mapped."""
        return ShardedColumn([fixed_lists(part) for part in self.parts("features")], self.starts)

    def take(self, rows: npt.ArrayLike) -> Vectors:
        """The vectors of `rows` in the order given, [n, D] float16, from the Arrow shards. InputError for what is no row."""
        return self.features.take(self.checked_rows(rows))

    @checked
    def vectors(self, texts: Iterable[str]) -> Vectors:
        """The vector of each text, [n, D] float16. InputError for a text that the bank does not have."""
        return self.take(self.rows_of_all(texts))


@register
class FeaturesKind(Kind):
    name = "features"
    manifest = FeatureManifest
    words = "feature bank"
    made_by = "`arrowbank encode`"
    next = "arrowbank verify {folder}\narrowbank search {folder} TEXT\narrowbank report {folder} --out report.html"
    shown = ("tokenizer", "model_path", "hidden_size", "max_key_tokens", "encoding", "effective_recipe", "limit")
    behind = ("texts", "tokens")
    rules = "arrowbank.combine.rules:FeatureRules"
    picture = "arrowbank.share.pictures:token_lengths"
    story = "arrowbank.report.vectors:tell_texts"
    bank = FeatureBank

    def parse(self, manifest: Manifest, where: Any) -> BankManifest:
        found = super().parse(manifest, where)
        try:
            msgspec.convert(manifest["recipe"], FeatureRecipe)
        except msgspec.ValidationError as error:
            raise self._wrong(manifest, where, str(error).replace("`$", "`$.recipe")) from None
        return found

    def columns(self, manifest: FeatureManifest) -> dict[str, Types]:
        return {
            "text": TEXT,
            "kind": STRING,
            "sha1": BINARY,
            "length": INT,
            "features": fixed(pa.float16(), manifest.hidden_size),
        }

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "encoding_method" not in recipe:
            return
        model, mirror = recipe["model"], mirror_fields(manifest["rows"]) if recipe["mirror"] else {}
        own = set(model) == {"name", "version"}
        yield from equal(manifest, {"format_version": 2, "dtype": "float16_memmap", "hidden_size": recipe["hidden_size"]})
        yield from equal(manifest, {**dict.fromkeys(("bank", "index", "texts"), ABSENT), **mirror})
        yield from equal(manifest, {"encoded_rows": manifest["rows"]} | ({"model_path": model["name"]} if own else {}))
        yield from equal(manifest, {name: recipe[name] for name in ("limit", "generations") if name in recipe})
        encoding = {**recipe["batches"], "backbone": "encoder", "normalize": recipe["normalize"], **({} if own else model)}
        encoding |= {"dim": recipe["dim"]} if "dim" in recipe else {}
        yield from equal(manifest, {"encoding": encoding})

    def files_beside(self, bank: FeatureBank) -> dict[str, int | None] | None:
        recipe = bank.manifest.recipe
        if "mirror" not in recipe:
            return None
        mirror = mirror_fields(len(bank)).values() if recipe["mirror"] else ()
        return {INFO: None, **dict.fromkeys((KEY_FILE, *mirror), len(bank))}

    def recounted(self, bank: FeatureBank) -> dict[str, Any]:
        return {"kinds": value_counts(bank, "kind", bank.manifest.kinds or {})}

    def bounds(self, bank: FeatureBank) -> Iterator[str]:
        longest = max(int(values_of(batch.column("length")).max(initial=0)) for batch in bank.shards())
        if longest > bank.manifest.max_key_tokens:
            yield f"max_key_tokens is {bank.manifest.max_key_tokens}, a row has {longest} tokens"

    def checks(self, bank: FeatureBank) -> Mapping[str, Callable[[], Check]]:
        named = {"keys": check_keys, "unique": check_unique, "vectors": _check_vectors, "look-up": check_look_up}
        return {name: partial(check, bank) for name, check in {**named, "mirror": _check_mirror}.items()}

    def describe(self, manifest: FeatureManifest) -> Description:
        encoding = manifest.encoding
        facts: dict[str, object] = {
            "vectors": f"{manifest.rows:,} × {manifest.hidden_size}, float16{', L2-normalised' if encoding.normalize else ''}",
            "model": manifest.model_path,
            "the first dimensions of the model's (Matryoshka)": encoding.dim,
            "pooling": encoding.pooling or "the encoder's own",
            "at most tokens a text": manifest.max_key_tokens,
            "recipe": manifest.effective_recipe,
            "texts by kind": manifest.kinds,
        }
        return Description("Feature bank", facts, ("feature-extraction",), LOAD if manifest.bank is None else MATRIX)
