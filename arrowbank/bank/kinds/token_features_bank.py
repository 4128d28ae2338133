"""Token feature banks: for each text a vector per token, for late-interaction models, with a look-up by text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.columns import nested_lists, values_of
from arrowbank.bank.keys import KEY_FILE
from arrowbank.bank.kinds import (
    BINARY,
    FOLDER,
    INT,
    STRING,
    TEXT,
    Description,
    Field,
    Kind,
    Types,
    column_sum,
    equal,
    register,
    vectors,
)
from arrowbank.bank.kinds.features_bank import NORM_TOLERANCE, Encoding, KeyedBank, Vectors, check_look_up
from arrowbank.bank.kinds.texts_bank import check_keys, check_unique, value_counts
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest, Width
from arrowbank.settings import checked

if TYPE_CHECKING:
    from arrowbank.bank.torch_rows import TorchVectors

SNIPPET = (
    f'from arrowbank import open_bank\n\nbank = open_bank("{FOLDER}")\n'
    "one, other = bank.take([0, 1])  # of each row [T, D] float16; bank.vectors(texts) finds texts\n"
    "score = (one @ other.T).max(axis=1).sum()  # MaxSim of the first text against the second"
)


class TokenFeatureManifest(BankManifest, kw_only=True):
    """`max_key_tokens` is how many tokens a text has at most, `tokens` how many all texts have: as many vectors there are."""

    hidden_size: Width
    model_path: str
    max_key_tokens: Width
    encoding: Encoding
    tokens: Count
    engine: dict[str, Any] | None = None
    tokenizer: str | None = None
    special_tokens: bool | None = None
    prompt: str | None = None
    encoded_rows: Count | None = None


class TokenFeatureBank(KeyedBank):
    """A committed token feature bank: N texts, and a vector of width D for each of their tokens."""

    manifest: TokenFeatureManifest

    @property
    def hidden_size(self) -> int:
        """D, the width of a vector."""
        return self.manifest.hidden_size

    def to_torch(self) -> TorchVectors:
        """The vectors as a `torch.utils.data.Dataset`: each row [T, D] float16."""
        from arrowbank.bank.torch_rows import TorchVectors

        return TorchVectors(self)

    def take(self, rows: npt.ArrayLike) -> list[Vectors]:
        """The vectors of each of `rows` in the order given, each [T, D] float16, a new array. InputError for what is no row."""
        found: list[Vectors] = []
        for row in self.checked_rows(rows).ravel().tolist():
            shard = int(np.searchsorted(self.starts, row, side="right")) - 1
            values, offsets = nested_lists(self.parts("features")[shard])
            at = row - int(self.starts[shard])
            found.append(values[offsets[at] : offsets[at + 1]].copy())
        return found

    @checked
    def vectors(self, texts: Iterable[str]) -> list[Vectors]:
        """The vectors of each text, each [T, D] float16. InputError for a text that the bank does not have."""
        return self.take(self.rows_of_all(texts))


def _check_token_vectors(bank: TokenFeatureBank) -> Check:
    """As many as the text has tokens, finite, not zero, and of norm 1 where the bank says so."""
    import torch

    normalized = bool(bank.manifest.recipe["normalize"])
    wrong: list[str] = []
    low, high = np.inf, 0.0
    for row, batch in bank.numbered_shards():
        values, offsets = nested_lists(batch.column("features"))
        norms = torch.linalg.vector_norm(torch.tensor(values).float(), dim=1).numpy()
        bad = ~np.isfinite(norms) | (norms == 0)
        if normalized:
            bad |= np.abs(norms - 1) > NORM_TOLERANCE
        for at in np.flatnonzero(bad)[:3].tolist():
            inside = int(np.searchsorted(offsets, at, side="right")) - 1
            wrong.append(f"row {row + inside} token {at - offsets[inside]} (norm {norms[at]:.4g})")
        differing = np.flatnonzero(np.diff(offsets) != values_of(batch.column("length")))
        wrong += [f"row {row + at} (another number of vectors than of tokens)" for at in differing[:3]]
        low, high = min(low, float(norms.min(initial=np.inf))), max(high, float(norms.max(initial=0)))
    said = f"finite, one per token, norms {low:.5f} to {high:.5f}"
    return found_wrong("vectors", wrong, said, "not finite, zero, of a wrong norm, or not one per token:")


@register
class TokenFeaturesKind(Kind):
    name = "token-features"
    manifest = TokenFeatureManifest
    words = "token feature bank"
    made_by = "`arrowbank encode --pooling none`"
    shown = ("tokenizer", "model_path", "hidden_size", "max_key_tokens", "tokens", "encoding", "limit")
    behind = ("texts", "tokens")
    rules = "arrowbank.combine.rules:FeatureRules"
    picture = "arrowbank.share.pictures:token_lengths"
    story = "arrowbank.report.vectors:tell_texts"
    bank = TokenFeatureBank

    def columns(self, manifest: TokenFeatureManifest) -> dict[str, Types]:
        features = vectors(pa.float16(), manifest.hidden_size)
        return {"text": TEXT, "kind": STRING, "sha1": BINARY, "length": INT, "features": features}

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "encoding_method" not in recipe:
            return
        dim = {"dim": recipe["dim"]} if "dim" in recipe else {}
        yield from equal(manifest, {"hidden_size": recipe["hidden_size"], "encoded_rows": manifest["rows"]})
        yield from equal(manifest, {name: recipe[name] for name in ("limit", "generations") if name in recipe})
        yield from equal(
            manifest, {"encoding": {**recipe["batches"], "normalize": recipe["normalize"], **recipe["model"], **dim}}
        )

    def files_beside(self, bank: TokenFeatureBank) -> dict[str, int | None]:
        return {INFO: None, KEY_FILE: len(bank)}

    def recounted(self, bank: TokenFeatureBank) -> dict[str, Any]:
        return {"kinds": value_counts(bank, "kind", bank.manifest.kinds or {}), "tokens": column_sum(bank, "length")}

    def bounds(self, bank: TokenFeatureBank) -> Iterator[str]:
        longest = max(int(values_of(batch.column("length")).max(initial=0)) for batch in bank.shards())
        if longest > bank.manifest.max_key_tokens:
            yield f"max_key_tokens is {bank.manifest.max_key_tokens}, a row has {longest} tokens"

    def checks(self, bank: TokenFeatureBank) -> Mapping[str, Callable[[], Check]]:
        named: dict[str, Any] = {
            "keys": check_keys,
            "unique": check_unique,
            "vectors": _check_token_vectors,
            "look-up": check_look_up,
        }
        return {name: partial(check, bank) for name, check in named.items()}

    def describe(self, manifest: TokenFeatureManifest) -> Description:
        encoding = manifest.encoding
        facts: dict[str, object] = {
            "texts": manifest.rows,
            "vectors": manifest.tokens,
            "a vector": f"{manifest.hidden_size} dimensions, float16{', L2-normalised' if encoding.normalize else ''}, one per token",
            "the first dimensions of the model's (Matryoshka)": encoding.dim,
            "model": manifest.model_path,
            "at most tokens a text": manifest.max_key_tokens,
            "texts by kind": manifest.kinds,
        }
        return Description("Token feature bank", facts, ("feature-extraction", "late-interaction"), SNIPPET)
