"""The folder of vLLM's hidden-state connector: a safetensors file a request, beside locks (`ExampleHiddenStatesConnector`, vLLM 0.32).

{request}.safetensors   token_ids int64 [S] · hidden_states [S, n, H], of the model's dtype

The n slots are the layers that the engine was asked for, in ascending order of its own ids: id i is what goes into block i, so our block
b is i = b + 1, the embeddings are 0, and i = the number of blocks is the last block's output before the final norm. That is the last
slot of a folder for trainers. The files have no loss masks and name no layers.
"""

from __future__ import annotations

import fcntl
from functools import partial
from pathlib import Path

import numpy as np

from arrowbank.bank.floats import Bits
from arrowbank.errors import InputError
from arrowbank.formats.dump import FLOATS, INTEGERS, BadSample, hidden_bits
from arrowbank.formats.safetensors import SafetensorsFile, Tensor
from arrowbank.formats.sample_files import FoundSample

NAME = "vllm"
TOKENS, HIDDEN = "token_ids", "hidden_states"
NORM = "pre"


def sample_paths(folder: Path) -> list[Path]:
    """The files of requests: by number where their names are numbers, else by name."""
    paths = folder.glob("*.safetensors")
    return sorted(paths, key=lambda path: (path.stem.rpartition("_")[0], _number(path.stem.rpartition("_")[2]), path.name))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else -1


def looks_like(folder: Path) -> bool:
    """Whether the first safetensors file in `folder` is a request's."""
    path = next(iter(sample_paths(folder)), None) if folder.is_dir() else None
    if path is None:
        return False
    try:
        return set(SafetensorsFile(path).tensors) == {TOKENS, HIDDEN}
    except InputError:
        return any(path.with_name(path.name + ".lock").is_file() for path in sample_paths(folder))


def slots(folder: Path) -> tuple[int, int]:
    """Hidden states a token in a folder's first file, the last ones among them, and their width."""
    shape = SafetensorsFile(sample_paths(folder)[0]).tensors[HIDDEN].shape
    return (shape[1], shape[2]) if len(shape) == 3 else (0, 0)


def open_sample(path: Path) -> FoundSample:
    """A request's file; the last slot is split off. Raises BadSample for one that is no good, or that vLLM still writes."""
    if _is_locked(path.with_name(path.name + ".lock")):
        raise BadSample("vLLM still writes it (its lock is held). Run the command again when it is done")
    file = SafetensorsFile(path)
    tokens, states = _tensor(file, TOKENS), _tensor(file, HIDDEN)
    if tokens.dtype not in INTEGERS or len(tokens.shape) != 1 or not tokens.shape[0]:
        raise BadSample(f"{TOKENS} are {tokens.dtype} of shape {tokens.shape}; expected integers, one for each token")
    if states.dtype not in FLOATS or len(states.shape) != 3 or states.shape[1] < 2 or not states.shape[2]:
        raise BadSample(
            f"{HIDDEN} are {states.dtype} of shape {states.shape}; expected floats of (tokens, layers and one, hidden size)"
        )
    if states.shape[0] != tokens.shape[0]:
        raise BadSample(f"{HIDDEN} are of {states.shape[0]} tokens, {TOKENS} are {tokens.shape[0]}")
    ids = file.array(tokens)
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise BadSample(f"{TOKENS} from {ids.min()} to {ids.max()}; expected 0 or more, in 32 bits")
    return FoundSample(
        name=path.stem,
        input_ids=ids.astype(np.int32),
        loss_mask=None,
        layers=states.shape[1] - 1,
        hidden_size=states.shape[2],
        norm=NORM,
        identity=file.header + ids.tobytes(),
        hidden=partial(_split, file, states),
    )


def _split(file: SafetensorsFile, states: Tensor) -> tuple[Bits, Bits]:
    bits = hidden_bits(file, states).reshape(states.shape)
    return np.ascontiguousarray(bits[:, :-1]).reshape(len(bits), -1), np.ascontiguousarray(bits[:, -1])


def _tensor(file: SafetensorsFile, name: str) -> Tensor:
    if name not in file.tensors:
        raise BadSample(f"no tensor {name}; the file has: {', '.join(file.tensors) or 'none'}")
    return file.tensors[name]


def _is_locked(lock: Path) -> bool:
    """Whether a process holds vLLM's lock of a file."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
