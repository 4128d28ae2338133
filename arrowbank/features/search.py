"""Searching a feature bank by text: a query goes the way that the bank's texts went, then its nearest rows are looked up.

Tokenizer, prompt, model, layer and pooling are what the bank's manifest says, and are proved to be the same ones by their
fingerprints before anything is loaded: cosines between vectors of two encoders say nothing."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank.columns import Rows, list_column
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.bank.open import open_bank
from arrowbank.engine.plan import BatchRules
from arrowbank.errors import ContractError, InputError, MissingDependency
from arrowbank.features.encode_config import Encoder, load_custom_encoder
from arrowbank.features.nearest import MARGIN, Cosines, nearest, true_cosines, unit_queries
from arrowbank.features.stored_vectors import encoded
from arrowbank.features.tokenize import TokenRules, prompts_of, token_rows
from arrowbank.models import ModelConfig, describe, load_encoder, load_tokenizer, tokenizer_fingerprint
from arrowbank.models.describe import NF4
from arrowbank.models.model_config import Device, GpuMemory, TrustRemoteCode
from arrowbank.settings import Count, Flag, Help, Place, Settings, checked, refuse_unread, require_one

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    pass


# Where a model computes does not make it another one, and float16 becomes float32 on a CPU: only last bits differ.
FREE_FIELDS = {"dtype"}
SHOWN = 110  # characters of a text in a list
REMEDY = "Give the model that the bank was made with (--model, --tokenizer or --encoder)."


def kind_of(where: str) -> str:
    """kind=KIND as the kind."""
    name, _, kind = where.partition("=")
    if name != "kind" or not kind:
        raise InputError(f"--where {where!r}: expected kind=KIND, as in --where kind=query.")
    return kind


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Settings):
    """What to search with, where that is no longer where the bank says, and among which rows."""

    model: Annotated[Place, Help("Where the bank's model is now. Default: where the bank says.", "M")] | None = None
    tokenizer: Annotated[Place, Help("Its tokenizer, if apart.", "M")] | None = None
    encoder: Annotated[str, Help("The encoder of a bank that was made with one: its code is run.", "MODULE:FACTORY")] | None = (
        None
    )
    kind: Annotated[str, Flag("--where"), Help("Only texts of this kind.", "kind=KIND", read=kind_of)] | None = None
    faiss: Annotated[bool, Help("Keep the vectors in memory with faiss: for many queries.")] = False
    device: Device | None = None
    gpu_memory_gb: GpuMemory | None = None
    trust_remote_code: TrustRemoteCode = False

    def check(self) -> None:
        require_one(self, ("model", "encoder"), needed=False)


@dataclass(frozen=True)
class Hit:
    """A text of the bank near a query: its row, its cosine to the query, its kind and itself."""

    row: int
    cosine: float
    kind: str
    text: str


class Searcher:
    """A feature bank, and the model that it was made with, loaded once.

    Raises what `open_bank` raises, InputError (a model that cannot be used, a kind that the bank does not have), ContractError
    (a model, tokenizer or encoder that is not the bank's: `field` says in what), MissingDependency (faiss).
    """

    @checked
    def __init__(self, folder: str | Path, config: SearchConfig | None = None) -> None:
        self.config = config or SearchConfig()
        self.bank: FeatureBank = open_bank(folder, kind=FeatureBank)
        self._rules = BatchRules(**{name: self._made["batches"][name] for name in ("max_batch", "token_budget")})
        self._among = _rows_of_kind(self.bank, self.config.kind)
        self._index: IndexedRows | None = None
        if self.config.faiss:
            self._index = IndexedRows(self.bank, self._among)
        if _model_config(self.bank, self.config) is None:
            _encoder_to_run(self.bank, self.config)  # before anything that takes long
        self._tokens = _token_rules(self.bank)
        self._tokenizer = self._load_tokenizer()
        _same(self.bank, {"tokenizer_fingerprint": tokenizer_fingerprint(self._tokenizer)}, self.bank.manifest.json)
        self._encoder = self._load_encoder()

    @property
    def _made(self) -> Mapping[str, Any]:
        """The recipe by which the bank was made."""
        recipe: Mapping[str, Any] = self.bank.manifest.recipe
        return recipe

    @checked
    def search(self, texts: Sequence[str], k: Count = 10) -> list[list[Hit]]:
        """For each text its k nearest texts of the bank, best first, of equals the lower row first; fewer where there are fewer.

        Raises InputError for a text of nothing but white space, and for k below 1.
        """
        rows, cosines = self.nearest(self.encode(texts), k)
        return [
            [self._hit(int(row), float(cosine)) for row, cosine in zip(*pair, strict=True)]
            for pair in zip(rows, cosines, strict=True)
        ]

    def nearest(self, vectors: npt.NDArray[np.float32], k: int) -> tuple[Rows, Cosines]:
        """The k nearest rows of vectors [Q, D] and their cosines, both [Q, k]: see arrowbank.features.nearest."""
        if self._index is not None:
            return self._index.nearest(vectors, k)
        return nearest(self.bank, vectors, k, among=self._among)

    @checked
    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """The vectors of texts as the bank's model gives them, [Q, D] float32, not normalised. InputError for an empty text."""
        plain = [text.strip().encode("utf-8", "replace").decode() for text in texts]  # as `scan` takes them in
        if not all(plain):
            raise InputError("a query is empty. Give at least a word.")
        ids = token_rows(self._tokenizer, self._tokens, plain, self.config.kind or QUERY)
        for text, row in zip(plain, ids, strict=True):
            if not row:
                raise InputError(f"query {text[:60]!r}: the tokenizer drops all its characters. Give a word.")
        offsets = np.cumsum([0, *map(len, ids)]).astype(np.int32)
        column = list_column(np.array([token for row in ids for token in row], np.int32), offsets)
        vectors = np.empty((len(ids), self.bank.hidden_size), np.float32)
        for batch, some in encoded(self._encoder, column, self._rules, self._made.get("dim")):
            vectors[batch.rows] = some
        return vectors

    def _hit(self, row: int, cosine: float) -> Hit:
        found = self.bank.slice(row, row + 1, ["kind", "text"])
        return Hit(row, cosine, found["kind"][0].as_py(), found["text"][0].as_py())

    def _load_tokenizer(self) -> PreTrainedTokenizerFast:
        """The bank's tokenizer. InputError where it is not where the bank says, with what to do."""
        named = self.config.tokenizer or self.config.model or self.bank.manifest.json["tokenizer"]
        try:
            return load_tokenizer(named, trust_remote_code=self.config.trust_remote_code)
        except InputError as error:
            if self.config.tokenizer or self.config.model:
                raise
            raise InputError(
                f"{error}\nThat is where {self.bank.folder} says that it was. If model and tokenizer lie elsewhere now, say where: "
                "--model M, --tokenizer M."
            ) from None

    def _load_encoder(self) -> Encoder:
        """The bank's model or own encoder, once it is known to be the same."""
        model = _model_config(self.bank, self.config)
        if model is None:
            own = load_custom_encoder(_encoder_to_run(self.bank, self.config))
            found: Mapping[str, Any] = {
                "version": str(own.version),
                "hidden_size": int(self._made.get("dim") or own.hidden_size),
            }
            _same(self.bank, found, {**self._made["model"], "hidden_size": self.bank.hidden_size})
            return own
        info = describe(model)
        _same(self.bank, info.recipe(), self._made["model"])
        return load_encoder(model, info=info, skip=self._made.get("prompt_tokens_left_out", 0))


def one_line(text: str, width: int = SHOWN) -> str:
    """A text for a list: on one line, cut to `width` characters."""
    plain = " ".join(text.split())
    return plain if len(plain) <= width else f"{plain[: width - 1]}…"


def _encoder_to_run(bank: FeatureBank, config: SearchConfig) -> str:
    """The encoder that the user names; the bank's only with trust_remote_code. InputError: a bank may come from a stranger, and to
    import what its recipe names would run any code that is importable here."""
    named = str(bank.manifest.recipe["model"]["name"])
    if config.encoder is None and not config.trust_remote_code:
        raise InputError(
            f"{bank.folder}: made with an encoder of somebody's own, {named!r}. Code that a bank names is not run. If you know that "
            f"code and trust it, name it yourself (--encoder {shlex.quote(named)}), or pass --trust-remote-code."
        )
    return config.encoder or named


def _model_config(bank: FeatureBank, config: SearchConfig) -> ModelConfig | None:
    """The model that the bank was made with, as it was run then; None where that was an encoder of the user's own."""
    made = bank.manifest.recipe["model"]
    by_model = "model_sha256" in made
    if config.encoder if by_model else config.model:
        raise ContractError(
            f"{bank.folder}: made with the {'model' if by_model else 'encoder'} {bank.manifest['model_path']}, not with "
            f"{config.encoder or config.model}. {REMEDY}",
            "model_path",
        )
    if not by_model:
        refuse_unread("a bank that was made with an encoder of your own", config, ["device", "gpu_memory_gb"])
        return None
    return ModelConfig(
        model=config.model or bank.manifest.model_path,
        pooling="auto" if "modules" in made else made["pooling"],  # the folder's own, with its modules
        layer=made["layer"],
        backbone=made["backbone"],
        dtype=made["dtype"],
        load_in_4bit=made["quantisation"] == NF4,
        device=config.device or "auto",
        gpu_memory_gb=config.gpu_memory_gb,
        trust_remote_code=config.trust_remote_code,
    )


def _token_rules(bank: FeatureBank) -> TokenRules:
    """How the bank's texts became tokens."""
    manifest = bank.manifest
    special = bool(manifest.special_tokens)
    return TokenRules(max_tokens=manifest.max_key_tokens, special_tokens=special, prompts=prompts_of(manifest))


def _same(bank: FeatureBank, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ContractError for the first field of `found` that is another one in `wanted`, what the bank was made with."""
    for field, value in found.items():
        if field not in FREE_FIELDS and wanted.get(field) != value:
            raise ContractError(
                f"{bank.folder}: {field} is {wanted.get(field)!r}, that of what would search it {value!r}. {REMEDY}", field
            )


def _rows_of_kind(bank: FeatureBank, kind: str | None) -> npt.NDArray[np.bool_] | None:
    """Which rows are of `kind`, [N]; None where any will do. InputError for a kind that no row is of."""
    if kind is None:
        return None
    known = bank.manifest.get("kinds", {})
    if not known.get(kind):
        raise InputError(f"{bank.folder}: has no text of kind {kind!r}; its kinds are {', '.join(known)}.")
    return bank.of_kind(kind)


QUERY = "query"  # the kind whose prompt a query gets, where prompts differ
MORE = 32  # rows asked for beside the k, at first
FEW = 4  # queries: faiss takes them one by one, more are quicker together
MOST = 4096  # where so many are as near as the k-th, a plain pass over the bank is quicker


class IndexedRows:
    """The vectors of a normalised feature bank in a faiss index: 2·N·D bytes of memory.

    Raises MissingDependency without faiss, InputError for a bank whose vectors keep their length: faiss knows no cosine.
    """

    def __init__(self, bank: FeatureBank, among: npt.NDArray[np.bool_] | None = None) -> None:
        if not bank.manifest.encoding.normalize:
            raise InputError(
                f"{bank.folder}: its vectors are not normalised, and faiss has no cosine. Search it without faiss."
            )
        self._bank, self._among = bank, among
        self._rows: Rows = np.arange(len(bank)) if among is None else np.flatnonzero(among)
        faiss = _faiss()
        self._index: Any = faiss.IndexScalarQuantizer(
            bank.hidden_size, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        )
        for first, part in zip(bank.starts[:-1], bank.features.parts, strict=True):
            here = part if among is None else part[among[first : first + len(part)]]
            self._index.add_sa_codes(np.ascontiguousarray(here).view(np.uint8))

    def nearest(self, queries: npt.NDArray[np.float32], k: int) -> tuple[Rows, Cosines]:
        """What `nearest` gives for the same arguments, and raises."""
        unit = unit_queries(self._bank, queries)
        count = len(self._rows)
        asked = min(count, k + MORE)
        while 1 <= k <= asked <= MOST and len(unit) <= FEW:
            scores, places = self._index.search(unit.astype(np.float32), asked)
            if (places < 0).any():  # a vector that is not finite: the plain way says so
                break
            rows, cosines = self._ordered(unit, self._rows[places])
            if asked == count or bool((scores[:, -1] + MARGIN < cosines[:, k - 1]).all()):
                return rows[:, :k], cosines[:, :k]
            asked = min(count, 4 * asked)
        return nearest(self._bank, queries, k, among=self._among)

    def _ordered(self, unit: npt.NDArray[np.float64], rows: Rows) -> tuple[Rows, Cosines]:
        """Each query's rows [Q, n] in the order of their cosines to it, and those."""
        stored = self._bank.take(rows.ravel())
        cosines = true_cosines(np.repeat(unit, rows.shape[1], axis=0), stored).reshape(rows.shape)
        order = np.lexsort((rows, -cosines))
        return np.take_along_axis(rows, order, 1), np.take_along_axis(cosines, order, 1)


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ImportError:
        raise MissingDependency("faiss is not installed: pip install 'arrowbank[search]', or search without it.") from None
