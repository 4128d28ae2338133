"""From the name a user gives to a folder on this machine, and to the weight files in it.

Only safetensors are read: a pickle can run code. What an index names is checked before anything else looks at it: transformers
would unpickle a weight file with another ending, and open one outside of the folder.

A Hub id is downloaded once into the Hub's own cache, and from then on everything is read from that folder, so that what was
fingerprinted is what is loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from arrowbank.bank.manifest import json_in
from arrowbank.bank.names import UnsafeName, checked_place
from arrowbank.errors import InputError
from arrowbank.secrets import know_hub_token

WEIGHTS = ".safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MODULES = "modules.json"  # of sentence-transformers

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5")
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")


def local_model(model: str | None) -> Path | None:
    """The folder or file of this machine that `model` names; None where it is the name of a repository."""
    path = None if model is None else Path(model).expanduser()
    return path if path is not None and path.exists() else None


def resolve_model(model: str, *, weights: bool = True, code: bool = False) -> Path:
    """The local folder of `model`: that folder itself, else the Hub's snapshot, downloaded where it is missing.

    `weights=False` is enough for a tokenizer; `code=True` fetches Python files too. Raises InputError if there is no such
    folder or repository, the Hub cannot be reached, or (with `weights`) no safetensors are there.
    """
    folder = local_model(model)
    if folder is None or not folder.is_dir():
        if folder is not None:
            raise InputError(f"model {model!r} is a file; expected the folder that holds config.json and the weights")
        if model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1:
            raise InputError(f"model {model!r}: no such folder; expected a folder or a Hugging Face Hub id like 'owner/name'")
        folder = _snapshot(model, [*_SMALL_FILES, *["*.safetensors"] * weights, *["*.py"] * code])
    if weights:
        adapter_files(transformer_folder(folder))
        weight_files(base_folder(folder, code=code))
    return folder


def adapter_files(folder: Path) -> list[Path]:
    """The files of the adapter in `folder`, as peft saves it; none where there is no adapter. InputError for pickled weights, or none."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return []
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise InputError(
            f"{folder}: has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS} (pickled weights are not read, since they can run code). Save the "
            "adapter with peft's save_pretrained(), or take it out of the folder."
        )
    return [folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS]


def transformer_folder(folder: Path) -> Path:
    """Where the transformer of `folder` is: the folder itself, or its first module where it is a sentence-transformers folder of the old
    layout (0_Transformer)."""
    if (folder / "config.json").is_file() or not (folder / MODULES).is_file():
        return folder
    return next((place for _, place in module_folders(folder)), folder)


def base_folder(folder: Path, *, code: bool = False) -> Path:
    """The folder of the weights that `folder` is about: that of its transformer, or of the base model of an adapter saved alone."""
    folder = transformer_folder(folder)
    if (folder / "config.json").is_file() or not (folder / ADAPTER_CONFIG).is_file():
        return folder
    config = folder / ADAPTER_CONFIG
    base = read_json(config).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(
            f"{config}: base_model_name_or_path is {base!r}; expected the model that the adapter belongs to. Add it."
        )
    try:
        return resolve_model(base, code=code)
    except InputError as error:
        raise InputError(f"{config}: names a base model that cannot be used: {error}") from None


def module_folders(folder: Path) -> list[tuple[str, Path]]:
    """The modules that modules.json lists: the class of each, and its folder. InputError for a file or a place that cannot be used."""
    file = folder / MODULES
    try:
        steps = [(str(step["type"]), str(step["path"])) for step in json_in(file, strict=False)]
        places = [path if path not in ("", ".") else "" for _, path in steps]
        checked = [
            checked_place(folder, f"{path}/config.json", file, nested=True).parent if path else folder for path in places
        ]
    except UnsafeName as error:
        raise InputError(str(error)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read ({error!r}); name a --pooling to ignore it") from None
    return [(kind, place) for (kind, _), place in zip(steps, checked, strict=True)]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, in the order of their names: one, or all that the index lists, with the index."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        names = _indexed_files(folder)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            what = f"does not have {', '.join(missing)}" if missing else "has an empty weight map"
            raise InputError(f"{folder}: {INDEX} is there but the folder {what}; download the model again")
        return [folder / INDEX, *(folder / name for name in names)]
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise InputError(
            f"{folder} has {pickled[0]} but no {SINGLE}: pickled weights are not read, since they can run code; load them once "
            "in a place you trust and write them with save_pretrained(), or take a revision that has safetensors"
        )
    raise InputError(f"{folder} has neither {SINGLE} nor {INDEX}; expected a folder that save_pretrained() wrote")


def _indexed_files(folder: Path) -> list[str]:
    """The names of the weight files in the index, sorted. InputError for one that is not a safetensors file in `folder`."""
    places = read_json(folder / INDEX).get("weight_map", {})
    if not isinstance(places, dict):
        raise InputError(f"{folder / INDEX}: weight_map is a {type(places).__name__}; expected the file of each tensor")
    names = dict.fromkeys(repr(name) if not isinstance(name, str) else name for name in places.values())
    for name in names:
        try:
            checked_place(folder, name, folder / INDEX)
        except UnsafeName as error:
            raise InputError(str(error)) from None
        if not name.endswith(WEIGHTS):
            raise InputError(
                f"{folder / INDEX}: lists {name!r}, which is no {WEIGHTS} file: pickled weights are not read, since they can run "
                "code; take a revision that has safetensors"
            )
    return sorted(names)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of the model folder. Raises InputError if it is missing, not JSON, or not an object."""
    try:
        value = json_in(file, strict=False)
    except FileNotFoundError:
        raise InputError(f"{file.parent} has no {file.name}; expected a model folder as save_pretrained() writes it") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{file} holds a {type(value).__name__}; expected a JSON object")
    return value


def _snapshot(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    know_hub_token()
    # HTTPError is the base class of whichever HTTP client the Hub's library uses; its own are OSErrors and ValueErrors.
    expected = (OSError, ValueError, errors.HTTPError)  # type: ignore[attr-defined]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except expected as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"model {model!r} is not a folder here, and the Hugging Face Hub gave no copy of it: {reason}\n"
            "Check the name, the network (HF_HUB_OFFLINE) and access rights, or give a local folder."
        ) from error


_PIECE = 64 << 20  # bytes; part of the definition of the digest
_READ = 1 << 20


def model_fingerprint(folder: Path, *, code: bool = False) -> str:
    """sha256 (hex) of the model in `folder`; `code` adds its Python files. Raises InputError if files are missing."""
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{folder} has no config.json; expected a model folder as save_pretrained() writes it")
    return files_digest(folder, [config, *weight_files(folder), *(sorted(folder.rglob("*.py")) if code else [])])


def adapted_fingerprint(base: str, folder: Path, files: Iterable[Path]) -> str:
    """sha256 (hex) of a model with an adapter: of the fingerprint `base` of the model, and the adapter's `files`."""
    return hashlib.sha256(f"{base}\n{files_digest(folder, files)}".encode()).hexdigest()


def files_digest(folder: Path, files: Iterable[Path]) -> str:
    """sha256 (hex) of the names (relative to `folder`), sizes and bytes of `files`, in the order of the names."""
    named = sorted((file.relative_to(folder).as_posix(), file, file.stat().st_size) for file in files)
    pieces = [(file, start) for _, file, size in named for start in range(0, size, _PIECE)]
    total = hashlib.sha256()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        digests = pool.map(_piece, pieces)
        for name, _, size in named:
            whole = hashlib.sha256()
            for _ in range(0, size, _PIECE):
                whole.update(next(digests))
            total.update(f"{name}\0{size}\0{whole.hexdigest()}\n".encode())
    return total.hexdigest()


def _piece(piece: tuple[Path, int]) -> bytes:
    file, start = piece
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        stream.seek(start)
        left = _PIECE
        while left and (block := stream.read(min(left, _READ))):
            digest.update(block)
            left -= len(block)
    return digest.digest()
