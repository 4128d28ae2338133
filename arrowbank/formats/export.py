"""How trainers number the layers of a target model, and the one place where numbers are converted.

Ours (`block_output`): id i is what decoder block i puts out, −1 the embeddings. Counted by what goes into a block
(`block_input`), the same hidden states have ids one higher, and the embeddings are 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from arrowbank.bank.files import HashedFile, require_space
from arrowbank.bank.floats import bfloat16_tensor
from arrowbank.bank.kinds.targets_bank import BLOCK_OUTPUT, TargetRows, TargetSample
from arrowbank.errors import InputError
from arrowbank.formats.export_folder import ExportFolder
from arrowbank.formats.sidecar import SIDECAR
from arrowbank.progress import Phase

BLOCK_INPUT = "block_input"
SHIFT = {BLOCK_OUTPUT: 0, BLOCK_INPUT: 1}


def theirs(ids: Sequence[int], convention: str) -> list[int]:
    """Our layer ids as a trainer of `convention` counts them."""
    return [layer + SHIFT[convention] for layer in ids]


def ours(ids: Sequence[int], convention: str) -> tuple[int, ...]:
    """A trainer's layer ids as we count them."""
    return tuple(layer - SHIFT[convention] for layer in ids)


FILE_BYTES = 4096  # what a file takes beside its tensors, at most


@dataclass(frozen=True)
class ExportFormat:
    """A trainer's format.

    write    takes rows that fit and an open folder, and source= and phase=; gives what the last file says
    owns     patterns of the names of its files
    fit      takes rows (all hidden states there, norm and layers known) and gives them as the format holds them, or raises InputError
    last     the file whose presence means that the export is whole
    shards   whether `write` also takes max_shard_bytes=
    version  the format's number, where it has one
    """

    write: Callable[..., dict[str, Any]]
    owns: tuple[str, ...]
    fit: Callable[[TargetRows], TargetRows]
    last: str = SIDECAR
    shards: bool = False
    version: int | None = None


def with_norm(rows: TargetRows, *, what: str, norms: tuple[str, ...]) -> TargetRows:
    """`rows`; InputError where their last hidden states are not of one of `norms`."""
    if rows.facts.last_hidden_norm not in norms:
        raise InputError(
            f"{rows.place}: its last hidden states are {rows.facts.last_hidden_norm} (after the final norm: post; before: pre), "
            f"{what} holds {' or '.join(norms)}. Capture or import the other."
        )
    return rows


def as_they_are(rows: TargetRows) -> TargetRows:
    """For a format that holds any rows."""
    return rows


def write_samples(
    rows: TargetRows,
    folder: ExportFolder,
    names: Sequence[str],
    write: Callable[[TargetSample, str, HashedFile], object],
    *,
    token_bytes: int,
    phase: Phase,
) -> None:
    """Write the file `names[i]` of every row i through `write`, which is given sample, name and file, and writes at most
    `token_bytes` a token and FILE_BYTES. DiskFull, before the first one, where they do not fit. `phase` counts bytes of rows.
    """
    lengths = rows.lengths.tolist()
    missing = [S for name, S in zip(names, lengths, strict=True) if name not in folder.receipts]
    require_space(folder.folder, sum(missing) * token_bytes + len(missing) * FILE_BYTES, "the export")

    def files() -> Iterator[tuple[str, Callable[[HashedFile], object]]]:
        for row, (name, S) in enumerate(zip(names, lengths, strict=True)):
            if name not in folder.receipts:
                yield name, partial(write, rows.read(row), name)
            phase.advance(rows.facts.sample_bytes(S))

    folder.write_group(files())


def save_torch(value: dict[Any, Any], file: HashedFile) -> None:
    """`torch.save` of a dict of tensors and plain values: `torch.load(weights_only=True)` reads it. The same dict gives the same
    bytes."""
    import torch

    try:
        torch.save(value, file)  # type: ignore[arg-type]  # it writes and flushes, no more
    except RuntimeError as error:
        if error.__context__ is None:
            raise
        raise error.__context__ from None  # a full disk or a Ctrl-C, which torch covers with a complaint about its own end


def token_tensors(sample: TargetSample) -> dict[str, Any]:
    """input_ids and loss_mask, int64 [S], each of its own memory."""
    import torch

    return {
        "input_ids": torch.from_numpy(sample.input_ids.astype("int64")),
        "loss_mask": torch.from_numpy(sample.loss_mask.astype("int64")),
    }


def hidden_tensors(sample: TargetSample) -> tuple[Any, Any]:
    """Taps [S, L·H] and last [S, H], bfloat16, each of its own memory."""
    return bfloat16_tensor(sample.taps), bfloat16_tensor(sample.last)


def facts_said(rows: TargetRows, *, source: str, convention: str = BLOCK_OUTPUT) -> dict[str, Any]:
    """What a sidecar says of `rows`. `convention`: how the trainer counts layers."""
    facts = rows.facts
    return {
        "num_samples": len(rows.lengths),
        "target_layer_ids": theirs(facts.target_layer_ids or (), convention),
        "layer_id_convention": convention,
        "hidden_size": facts.hidden_size,
        "target_model_name_or_path": facts.target_model_name_or_path,
        "last_hidden_norm": facts.last_hidden_norm,
        "loss_mask": facts.loss_mask,
        "vocab_size": facts.vocab_size,
        "num_hidden_layers": facts.num_hidden_layers,
        "source": source,
    }
