"""A draft out of a checkpoint, and a copy of the checkpoint with another draft in it.

A model that has no draft gets one that starts as the trunk's last block, under canonical names. A written draft has its own names, in its
own dtype or re-encoded. The copy is made whole in a hidden folder beside its place and renamed at the end; the source is never written to.
Weight files without a tensor of the draft are hard links where the disk allows, all other files are copies."""

from __future__ import annotations

import errno
import glob
import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arrowbank.bank.files import json_bytes, publish_bytes, publishing, require_space, sweep_temporaries, sync_folder
from arrowbank.bank.names import place_fault
from arrowbank.bank.places import require_separate
from arrowbank.bank.processes import temporary_beside
from arrowbank.bank.refusals import existing, explained
from arrowbank.errors import InputError
from arrowbank.formats.safetensors import DTYPES, PIECE, SafetensorsFile, write_safetensors
from arrowbank.models.model_folder import INDEX, SINGLE, read_json
from arrowbank.mtp.checkpoint import (
    NAMES,
    PROVENANCE,
    Checkpoint,
    StoredTensors,
    TensorPlace,
    check_codec,
    encode,
    find_places,
    is_router,
    stored_bytes,
)
from arrowbank.mtp.draft import Draft, DraftOrigin, Trunk, trunk_of
from arrowbank.mtp.layouts import CANONICAL, FoundLayout, shown

_PROBE_ROWS = 3
DRAFT_FILE = "model-mtp.safetensors"  # of a sharded model that had no draft
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}


def load_draft(model: Any, folder: Path, *, dtype: torch.dtype | None = None, number: int = 0) -> Draft:
    """The draft stored in `folder`, over `model`: its trunk, a language model of transformers with its head.

    `folder` may be another checkpoint than the trunk's (--draft-from). dtype: the trunk's where None. number: which draft of
    several. It is fed what the checkpoint's record says, else what its family is fed. Raises InputError if there is no draft, its
    layout is not known, or its tensors are not those of a block of this trunk.
    """
    checkpoint = Checkpoint(folder)
    found = checkpoint.layout(number)
    trunk = model if isinstance(model, Trunk) else trunk_of(model)
    sparse = any(".experts." in name for name in checkpoint.names if name.startswith(found.block))
    draft = Draft(trunk, sparse=sparse, dtype=dtype, layout=found.layout)
    own = draft.tensors()
    places = find_places(found, {name: tuple(tensor.shape) for name, tensor in own.items()}, checkpoint.names)
    check_shapes(checkpoint, places)
    _fill(own, places, checkpoint)
    draft.origin = DraftOrigin(init="checkpoint", family=found.layout.family, notes=_notes(checkpoint, found))
    written = (checkpoint.record() or {}).get("draft")
    if isinstance(written, dict):  # by save_draft: what it was fed need not be the family's
        draft.feed(hidden=written.get("hidden"), recycle=written.get("recycle"))
    check_plain(draft)
    return draft


def init_from_last_block(model: Any, *, dtype: torch.dtype | None = None) -> Draft:
    """A draft of the canonical family whose block is the trunk's last one with full attention, for a model without a draft.

    All its norms are the trunk's final norm, and eh_proj is half the embedding plus half the hidden state, both normed: it has to
    be trained with its projection. Raises InputError for a trunk whose blocks are not plain floats.
    """
    trunk = model if isinstance(model, Trunk) else trunk_of(model)
    block = trunk.blocks[trunk.template].state_dict()
    draft = Draft(trunk, sparse=any("experts." in name for name in block), dtype=dtype, layout=CANONICAL)
    own = {name.removeprefix("block."): tensor for name, tensor in draft.tensors().items() if name.startswith("block.")}
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in block.items()}:
        odd = sorted(set(block) ^ set(own)) or sorted(name for name in own if own[name].shape != block[name].shape)
        raise InputError(
            f"the trunk's block {trunk.template} ({type(trunk.blocks[trunk.template]).__name__}) cannot be copied into a draft: they "
            f"differ in {', '.join(odd[:4])}. Expected a block of plain weights; load the trunk without quantising it."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(block[name])
        half = torch.eye(trunk.hidden_size, dtype=draft.dtype, device=draft.eh_proj.weight.device) / 2
        draft.eh_proj.weight.copy_(torch.cat((half, half), dim=1))
    draft.feed(hidden="pre", recycle="pre")
    draft.origin = DraftOrigin(init="last block", family=CANONICAL.family)
    check_plain(draft)
    return draft


def check_shapes(checkpoint: Checkpoint, places: list[TensorPlace]) -> None:
    """InputError, by tensor, for a shape that is not the one of its place."""
    for place in places:
        shape = checkpoint.shape(place.stored)
        if shape != place.shape:
            raise InputError(
                f"{checkpoint.place[place.stored]}: tensor {place.stored} has shape {shape}; expected {place.shape} for this "
                "trunk. Give the draft of a model of this shape."
            )


def check_plain(draft: Draft) -> None:
    """InputError for a family whose model does more to its inputs than run its blocks on them (scales them, say)."""
    seen: list[torch.Tensor] = []
    inputs = torch.linspace(-1, 1, _PROBE_ROWS * draft.trunk.hidden_size, device=draft.trunk.device, dtype=draft.dtype)
    inputs = inputs.view(1, _PROBE_ROWS, -1)
    hooks = (
        draft.block.register_forward_pre_hook(lambda _, args, kwargs: seen.append(_first(args, kwargs)), with_kwargs=True),
        draft.block.register_forward_hook(
            lambda _, args, output: seen.append(output if torch.is_tensor(output) else output[0])
        ),
    )
    with torch.no_grad():
        last = draft.body(inputs_embeds=inputs, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    if len(seen) != 2 or not torch.equal(seen[0], inputs) or seen[1].data_ptr() != last.data_ptr():
        raise InputError(
            f"{type(draft.body).__name__} does more to its inputs than run blocks on them; no draft can be made for it"
        )


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _fill(own: Mapping[str, torch.Tensor], places: list[TensorPlace], checkpoint: Checkpoint) -> None:
    with torch.no_grad():
        for place in places:
            place.write(own[place.own], checkpoint.read(place.stored))


def _notes(checkpoint: Checkpoint, found: FoundLayout) -> tuple[str, ...]:
    """Says which of a draft's copies of embeddings and head are not copies of the trunk's: the trunk's are used all the same."""
    whose = {
        "embed_tokens.weight": ("embed_tokens.weight",),
        "shared_head.head.weight": ("lm_head.weight", "embed_tokens.weight"),
    }
    notes = []
    for name in found.layout.shared:
        stored = found.prefix + name
        if stored not in checkpoint.place:
            continue
        trunks = [
            other
            for end in whose[name]
            for other in sorted(checkpoint.names)
            if other.endswith(end) and not other.startswith(found.prefix)
        ]
        if trunks and not checkpoint.same(stored, trunks[0]):
            notes.append(f"{stored} differs from {trunks[0]}; the draft uses the trunk's, and its own stays as it is")
    return tuple(notes)


@dataclass(frozen=True, kw_only=True)
class SavedDraft:
    """What was written: the folder, the codec, the family of the names, the draft's bytes on disk (scales included, shared copies
    not), and the sha256 of each weight file with a part of it, by name."""

    folder: Path
    codec: str
    family: str
    draft_bytes: int
    sha256: Mapping[str, str]


@dataclass
class _Changes:
    """New tensors by the file they go to, and the names that go away."""

    new: dict[str, StoredTensors] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


def save_draft(
    draft: Draft, source: Path, target: Path, *, codec: str = "keep", provenance: Mapping[str, Any], number: int = 0
) -> SavedDraft:
    """Write the checkpoint `source` with the tensors of `draft` as the folder `target`, which must not exist or be empty.

    codec: see checkpoint.py; with "keep", a tensor that is still what the source has keeps its bytes. `provenance` (JSON-able) goes into
    the metadata of each weight file with a part of the draft, and with it, as "draft", its family, codec, what it is fed and how it
    began. Raises InputError for a target in or over the source, a codec that is not known, or a source whose draft has other
    tensors; DiskFull before anything is written.
    """
    check_codec(codec)
    check_target(source, target)
    checkpoint = Checkpoint(source)
    known = checkpoint.known_layout(number)
    found = known or FoundLayout(layout=CANONICAL, prefix=CANONICAL.prefixes[0])
    own = draft.tensors()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    places = find_places(found, shapes, checkpoint.names if known else None)
    if known:
        check_shapes(checkpoint, places)
    elif strange := found.own_tensors(checkpoint.names):
        raise InputError(
            f"{source} has {shown(strange)}, which is no draft of a known layout, where the new draft would be stored. Remove these "
            "tensors first."
        )
    changes = _changes(checkpoint, own, places, codec=codec, dtype=draft.trunk.dtype)
    kept = {
        "family": found.layout.family,
        "codec": codec,
        "hidden": draft.hidden,
        "recycle": draft.recycle,
        "init": draft.origin.init,
    }
    record = json.dumps(dict(provenance) | {"draft": kept}, sort_keys=True, ensure_ascii=False)
    hidden = temporary_beside(target)
    with explained(target):
        require_space(target.parent, _needed(checkpoint, changes), "the copy of the checkpoint")
        sweep_temporaries(target.parent, glob.escape(target.name) + ".*")
        hidden.mkdir(parents=True)
        try:
            digests = _write(checkpoint, hidden, changes, record)
            hidden.rename(target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    return SavedDraft(folder=target, codec=codec, family=found.layout.family, draft_bytes=_size(changes), sha256=digests)


def copy_bytes(checkpoint: Checkpoint, target: Path, shapes: Mapping[str, Sequence[int]], *, codec: str, itemsize: int) -> int:
    """The bytes that `save_draft` writes for a copy `target` of `checkpoint` with a draft whose tensors, by their stored names, have
    `shapes`; `itemsize` is that of the trunk's dtype, in which a checkpoint without a draft stores one."""
    known = checkpoint.known_layout()
    names = known.own_tensors(checkpoint.names) if known else []
    gone = {part for name in names for part in checkpoint.parts(name)}
    single = (checkpoint.folder / SINGLE).is_file()
    rewritten = {checkpoint.place[name].name for name in names} or {SINGLE if single else DRAFT_FILE}
    size = 0
    for name, shape in shapes.items():
        if name not in checkpoint.names:
            size += stored_bytes(name, shape, codec, itemsize)
            continue
        before, stored = checkpoint.codec(name), checkpoint.files[checkpoint.place[name]].tensors[name]
        kept = (
            (stored.stop - stored.start) // math.prod(stored.shape) if before == "keep" else 4
        )  # what is encoded decodes to float32
        size += stored_bytes(name, shape, before if codec == "keep" else codec, kept)
    for path, file in checkpoint.files.items():
        if path.name in rewritten:
            size += file.size - sum(tensor.stop - tensor.start for name, tensor in file.tensors.items() if name in gone)
    linked = existing(target).stat().st_dev == checkpoint.folder.stat().st_dev
    for path in _others(checkpoint.folder):
        if path.name not in rewritten and not (linked and path.suffix == ".safetensors"):
            size += path.stat().st_size
    return size


def check_target(source: Path, target: Path) -> None:
    """InputError for a target that overlaps the source, or holds something already."""
    require_separate([("the copy", target)], [("its source", source)])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is there already and not empty; expected a new folder. Give another one, or remove it.")


def is_of_plan(target: Path, plans: Collection[str | None]) -> bool:
    """Whether the checkpoint `target` has a record of one of `plans` (their digests, as "plan" in its provenance)."""
    try:
        return ((Checkpoint(target).record() or {}).get("plan") or "") in plans
    except (InputError, OSError):  # no model folder, or not one of ours
        return False


def remove_of_plan(target: Path, plans: Collection[str | None]) -> None:
    """Remove the checkpoint `target` if it is of one of `plans`, at once: killed on the way, it is there whole or not at all."""
    if not is_of_plan(target, plans):
        return
    hidden = temporary_beside(target)
    target.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _changes(
    checkpoint: Checkpoint, own: Mapping[str, torch.Tensor], places: list[TensorPlace], *, codec: str, dtype: torch.dtype
) -> _Changes:
    changes = _Changes()
    single = (checkpoint.folder / SINGLE).is_file()
    for place in places:
        values = place.read(own[place.own].detach()).to("cpu")
        if place.stored in checkpoint.names:
            changes.gone.update(checkpoint.parts(place.stored))
            file = checkpoint.place[place.stored].name
            stored = _as_it_was(checkpoint, place.stored, values, codec)
        else:
            file = SINGLE if single else DRAFT_FILE
            stored = encode(place.stored, values, codec, values.dtype if is_router(place.stored) else dtype)
        changes.new.setdefault(file, {}).update(stored)
    return changes


def _as_it_was(checkpoint: Checkpoint, name: str, values: torch.Tensor, codec: str) -> StoredTensors:
    """What is stored of a tensor that the source has: to keep, the source's own bytes if the values are still those."""
    before = checkpoint.read(name)
    if codec != "keep":
        return encode(name, values, codec, before.dtype)
    if torch.equal(before.to(values.dtype), values):
        return {part: checkpoint.raw(part) for part in checkpoint.parts(name)}
    return encode(name, values, checkpoint.codec(name), before.dtype)


def _write(checkpoint: Checkpoint, folder: Path, changes: _Changes, record: str) -> dict[str, str]:
    """Write the whole copy into `folder`; the digests of the rewritten weight files."""
    files = {path.name: file for path, file in checkpoint.files.items()}
    digests = {
        name: _rewrite(folder / name, files.get(name), stored, changes.gone, record)
        for name, stored in sorted(changes.new.items())
    }
    indexed = not (checkpoint.folder / SINGLE).is_file()
    if indexed:
        publish_bytes(folder / INDEX, json_bytes(_index(checkpoint, changes)))
    for path in _others(checkpoint.folder):
        name = path.relative_to(checkpoint.folder)
        if str(name) in digests or (indexed and str(name) == INDEX):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _take_over(path.resolve(), folder / name)
    sync_folder(folder)
    return digests


def _rewrite(path: Path, before: SafetensorsFile | None, new: StoredTensors, gone: set[str], record: str) -> str:
    """A safetensors file with the tensors of `before` that stay and the `new` ones; its sha256.

    Larger elements first, then by name: so every tensor begins at a multiple of its element's size.
    """
    entries: list[tuple[int, str, tuple[str, Sequence[int], Any]]] = []
    for name, tensor in (before.tensors if before else {}).items():
        if name not in gone and before:
            size = np.dtype(DTYPES.get(tensor.dtype, "u1")).itemsize
            entries.append((-size, name, (tensor.dtype, tensor.shape, before.raw(tensor))))
    for name, values in new.items():
        data = values.contiguous().view(-1).view(torch.uint8).numpy()
        entries.append((-values.element_size(), name, (NAMES[values.dtype], values.shape, data)))
    entries.sort(key=lambda entry: entry[:2])
    metadata = {"format": "pt"} | (before.metadata if before else {}) | {PROVENANCE: record}
    with publishing(path) as file:
        write_safetensors(file, {name: tensor for _, name, tensor in entries}, metadata)
    return file.digest


def _index(checkpoint: Checkpoint, changes: _Changes) -> dict[str, Any]:
    """The source's index with the draft's tensors where they now are."""
    index = read_json(checkpoint.folder / INDEX)
    places = {name: file for name, file in index["weight_map"].items() if name not in changes.gone}
    places |= {name: file for file, stored in changes.new.items() for name in stored}
    kept = sum(
        tensor.stop - tensor.start
        for file in checkpoint.files.values()
        for name, tensor in file.tensors.items()
        if name not in changes.gone
    )
    metadata = dict(index.get("metadata") or {}) | {"total_size": kept + _size(changes)}
    return index | {"metadata": metadata, "weight_map": dict(sorted(places.items()))}


def _needed(checkpoint: Checkpoint, changes: _Changes) -> int:
    """The bytes that are written anew: the weight files with a part of the draft in them."""
    return _size(changes) + sum(file.size for path, file in checkpoint.files.items() if path.name in changes.new)


def _size(changes: _Changes) -> int:
    return sum(tensor.nbytes for stored in changes.new.values() for tensor in stored.values())


def _others(folder: Path) -> Iterable[Path]:
    """All files of a model folder but hidden ones and those in hidden folders. InputError for a link out of the folder: what it leads
    to would be published with the copy."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or (path.is_dir() and not path.is_symlink()):
            continue
        if fault := place_fault(folder, name.as_posix()):
            raise InputError(f"{path}: cannot be copied ({fault}). Put the file itself into {folder}, or remove the link.")
        if path.is_file():
            yield path


def _take_over(path: Path, copy: Path) -> None:
    """A weight file as a hard link, where the disk allows; anything else as a copy, so that editing one leaves the other alone."""
    if path.suffix == ".safetensors" or copy.suffix == ".safetensors":
        try:
            copy.hardlink_to(path)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    with path.open("rb", buffering=0) as source, publishing(copy, hash=None) as file:
        while piece := source.read(PIECE):
            file.write(piece)
