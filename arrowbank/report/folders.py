"""What any folder or file is that one may find in front of oneself, and what to run next: banks, and what comes before and after them.

A row of SIGNS is a kind of folder: how it is known (a look at names, and at small files), and what is said of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from arrowbank.bank.info import PARTS, describe_folder
from arrowbank.bank.manifest import FORMAT, MANIFEST, STATE, read_json
from arrowbank.bank.remote.addresses import is_address, parse_address
from arrowbank.errors import ArrowbankError, InputError
from arrowbank.formats import deepspec, dump, modelopt, specforge, speculators, vllm_states
from arrowbank.formats.export_checks import layout_of
from arrowbank.formats.sidecar import SIDECAR, find_sidecar, origin, sidecar_in

EPISODES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".parquet", ".arrow")
TOKEN_IDS = (".bin", ".npy")
# what an export's sidecar counts and names
COUNTED = (
    *("num_samples", "rows", "examples", "triples", "stride", "arm", "split"),
    *("target_model_name_or_path", "target_layer_ids", "layer_id_convention", "last_hidden_norm"),
)
IMPORTED = ("speculators", "specforge-eagle3", "specforge-dspark", "modelopt")  # exports that `targets import` reads back
NAMED = 5  # of a folder's files, in an answer
CHAIN_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # a config that speaks of an MTP draft

DECODERS = ("ForCausalLM", "ForConditionalGeneration")
ENCODE = "arrowbank encode TOKENS --model {folder} --out DIR"
CAPTURE = "\narrowbank targets capture --model {folder} --source FILE --layers LIST --out DIR"


@dataclass(frozen=True)
class Sign:
    """A kind of folder: `known` says whether one is it, `say` gives facts, `next` is the command to run then."""

    kind: str
    known: Callable[[Path], bool]
    next: str
    say: Callable[[Path], dict[str, Any]] = lambda folder: {}


def describe_any(place: str | Path) -> dict[str, Any]:
    """Facts about what lies at `place`, with `kind` and `next`. InputError where it is nothing that a command takes."""
    folder = _local(place)
    if not (folder.is_dir() or folder.is_file()):
        raise InputError(f"{folder}: no such folder or file. Give one that is there.")
    if is_bank(folder) or any(is_bank(folder / part) for part in PARTS):
        return describe_folder(folder)
    for sign in SIGNS:
        if sign.known(folder):
            return {
                "folder": str(folder),
                "kind": sign.kind,
                **sign.say(folder),
                "next": sign.next.format(folder=shlex.quote(str(folder))),
            }
    raise InputError(
        f"{folder}: {_inside(folder)}; nothing that a command of arrowbank takes. Give a bank, a folder or file of episodes "
        "(.jsonl, Parquet), token ids (.bin, .npy), an engine's dump, a model, or what was exported."
    )


def _local(place: str | Path) -> Path:
    """The place itself. InputError for an address: what lies there would have to be fetched to be looked at."""
    if not is_address(place):
        return Path(place)
    address = parse_address(str(place))
    if address.local is None:
        raise InputError(
            f"{address.shown}: an address, and only what is on this machine can be looked at. "
            f"Fetch it: arrowbank pull {address.shown} DIR"
        )
    return address.local


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty for another value, which is somebody else's. CorruptBank when it is not JSON."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def is_bank(folder: Path) -> bool:
    """Whether there is a bank, committed or not."""
    return (folder / MANIFEST).is_file() and not (folder / deepspec.INDEX).exists()


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda folder: all((folder / name).is_file() for name in names)


def _files(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    """The files with one of these endings: the file itself, or those right inside a folder."""
    paths = [folder] if folder.is_file() else sorted(path for path in folder.iterdir() if path.is_file())
    return [path for path in paths if path.name.endswith(endings) and path.name != MANIFEST]


def _ending(*endings: str) -> Callable[[Path], bool]:
    return lambda folder: bool(_files(folder, endings))


def _named(*endings: str) -> Callable[[Path], dict[str, Any]]:
    def say(folder: Path) -> dict[str, Any]:
        files = _files(folder, endings)
        more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
        return {
            "files": ", ".join(path.name for path in files[:NAMED]) + more,
            "bytes": sum(path.stat().st_size for path in files),
        }

    return say


def _inside(folder: Path) -> str:
    if folder.is_file():
        return f"a file of {folder.stat().st_size:,} bytes"
    names = sorted(path.name for path in folder.iterdir())
    return f"holds {', '.join(names[:NAMED])}{' …' if len(names) > NAMED else ''}" if names else "an empty folder"


def _model(folder: Path) -> dict[str, Any]:
    config = _object(folder / "config.json")
    inner = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    facts = {
        "architecture": ", ".join(map(str, _list(config.get("architectures")) or [config.get("model_type")])),
        "layers": inner.get("num_hidden_layers"),
        "hidden_size": inner.get("hidden_size"),
        "vocab_size": inner.get("vocab_size"),
        "mtp_draft": next((inner[name] for name in CHAIN_KEYS if inner.get(name)), None),
        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _decodes(folder: Path) -> bool:
    """Whether there is a model that gives a next token."""
    return _is_model(folder) and _model(folder)["architecture"].endswith(DECODERS)


def _is_model(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and bool(_object(config).keys() & {"architectures", "model_type"})


def _is_export(folder: Path) -> bool:
    return folder.is_dir() and find_sidecar(folder) is not None


def _exported(folder: Path) -> dict[str, Any]:
    said = sidecar_in(folder)
    facts = {name: said[name] for name in COUNTED if said.get(name) is not None}
    size = sum(entry["bytes"] for entry in said["files"])
    return {"format": said["format"], **facts, "made_from": origin(said), "files": len(said["files"]), "bytes": size}


def _is_foreign_cache(folder: Path) -> bool:
    return folder.is_dir() and layout_of(folder) in (speculators.NAME, *specforge.FORMATS)


def _by_layout(folder: Path) -> dict[str, Any]:
    return {"format": layout_of(folder), "digests": f"none: there is no {SIDECAR}"}


def _requests(folder: Path) -> dict[str, Any]:
    slots, hidden_size = vllm_states.slots(folder)
    return {
        "samples": len(vllm_states.sample_paths(folder)),
        "layers": slots - 1,
        "hidden_size": hidden_size,
        "last_hidden_norm": "pre",
    }


def _sample_files(pattern: str, folder: Path) -> dict[str, Any]:
    paths = list(folder.rglob(pattern))
    return {"samples": len(paths), "bytes": sum(path.stat().st_size for path in paths)}


def _cache(folder: Path) -> dict[str, Any]:
    note = _object(folder / deepspec.MANIFEST)
    facts = {name: value for name, value in note.items() if isinstance(value, str | int) or name == "target_layer_ids"}
    return facts | (_exported(folder) if _is_export(folder) else _by_layout(folder))


def _report(folder: Path) -> dict[str, Any]:
    report = _object(folder / "report.json")
    return {name: value for name, value in report.items() if isinstance(value, str | int | float)}


SIGNS = (
    Sign(
        "a DeepSpec target cache",
        _has(deepspec.INDEX, deepspec.MANIFEST),
        "arrowbank verify {folder}\narrowbank targets verify {folder} --model M\narrowbank targets import {folder} --out DIR",
        _cache,
    ),
    Sign(
        "an export, for its trainer",
        lambda folder: _is_export(folder) and sidecar_in(folder)["format"] in IMPORTED,
        "arrowbank verify {folder}\narrowbank targets import {folder} --out DIR",
        _exported,
    ),
    Sign("an export, for its trainer", _is_export, "arrowbank verify {folder}", _exported),
    Sign(
        "an inference engine's dump of hidden states",
        _has(dump.INDEX),
        "arrowbank targets import {folder} --target-model NAME --layers LIST --out DIR",
        _named(".jsonl"),
    ),
    Sign(
        "a folder of vLLM's hidden-state connector",
        lambda folder: folder.is_dir() and not _is_model(folder) and vllm_states.looks_like(folder),
        "arrowbank targets import {folder} --target-model NAME --engine-layers LIST --masks FILE --out DIR",
        _requests,
    ),
    Sign(
        "a speculators folder of hidden states",
        lambda folder: folder.is_dir() and speculators.looks_like(folder),
        "arrowbank verify {folder}\narrowbank targets import {folder} --target-model NAME --layers LIST --out DIR",
        _by_layout,
    ),
    Sign(
        "SpecForge's files of hidden states",
        lambda folder: folder.is_dir() and specforge.looks_like(folder),
        "arrowbank verify {folder}\narrowbank targets import {folder} --target-model NAME --layers LIST --out DIR",
        partial(_sample_files, "*.ckpt*"),
    ),
    Sign(
        "Model-Optimizer's files of hidden states",
        lambda folder: folder.is_dir() and modelopt.looks_like(folder),
        "arrowbank targets import {folder} --target-model NAME --layers LIST --out DIR",
        partial(_sample_files, "*.pt"),
    ),
    Sign("a trainer's cache of hidden states", _is_foreign_cache, "arrowbank verify {folder}", _by_layout),
    Sign(
        "what a healing measured",
        _has("plan.json", "report.json"),
        "look at trace.svg, or arrowbank report {folder} --out report.html",
        _report,
    ),
    Sign(
        "a healing that is not finished",
        _has("plan.json"),
        "the command that began it, again: it goes on where it stopped",
    ),
    Sign("scores of IN2 probes", _has("scores.json", "scores.csv"), "look at scores.svg", _named(".csv")),
    Sign("a causal language model", _decodes, ENCODE + CAPTURE, _model),
    Sign("a model", _is_model, ENCODE, _model),
    Sign(
        "a dataset that was saved with save_to_disk",
        lambda folder: (folder / STATE).is_file() or (folder / "dataset_dict.json").is_file(),
        "arrowbank scan --source train={folder} --out DIR",
    ),
    Sign(
        "files of episodes or texts",
        _ending(*EPISODES),
        "arrowbank build --source train={folder} --model M --out DIR",
        _named(*EPISODES),
    ),
    Sign(
        "token ids",
        _ending(*TOKEN_IDS),
        "arrowbank in2 build --arm c --length T --examples N --filler {folder} --out DIR",
        _named(*TOKEN_IDS),
    ),
)


def banks_under(folder: Path, depth: int = 2) -> list[Path]:
    """The banks in `folder` and, `depth` deep, in the folders inside it, by name; a few thousand names are looked at, at most."""
    found, level = [], [folder]
    for _ in range(depth + 1):
        found += [path for path in level if is_ours(path)]
        level = [inside for path in level[:1000] if path not in found for inside in _folders(path)]
    return sorted(found)


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir()]
    except OSError:  # not for us to read
        return []


def is_ours(folder: Path) -> bool:
    """Whether there is a bank whose manifest says so."""
    try:
        return is_bank(folder) and _object(folder / MANIFEST).get("format") == FORMAT
    except (OSError, ArrowbankError):
        return False
