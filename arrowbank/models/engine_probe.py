"""The probe of a serving engine: the same few rows through the engine and through transformers, before the first shard.

An engine has kernels, layer numbers and attention caches of its own. What it gives is compared for every token and layer. Two things
are asked of it: each vector is close to the one that transformers gives, and it is closer to that one than to those of the layers
beside it, since in a trained model neighboring layers are nearly alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from arrowbank.bank.files import publishing
from arrowbank.bank.floats import cosines
from arrowbank.bank.kinds.targets_bank import EMBEDDINGS
from arrowbank.bank.locks import waiting_lock
from arrowbank.errors import InputError
from arrowbank.models.device import resolve_device
from arrowbank.models.load import empty_part, widen_where_needed
from arrowbank.models.taps import load_taps_reader
from arrowbank.models.vllm_engine import MOST_TOKENS

if TYPE_CHECKING:
    from arrowbank.models import ModelConfig, ModelInfo

    Ids = npt.NDArray[np.int32]

LENGTHS = (1100, 150)  # of the rows, at least: beyond one block of every engine's attention cache, and two rows in one batch
STRETCH = 16  # tokens that are judged together
FLOORS = {"float32": 0.9999, "float16": 0.99, "bfloat16": 0.98}  # of a stretch's cosine: its lowest in float32, else its median
ALIKE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}  # a relative error below which no neighbor is looked at


@dataclass(frozen=True)
class Reference:
    """What transformers gives for the probe's rows.

    rows     the token ids of each row
    layers   ascending block ids (−1: the embeddings) that `states` holds: those that are captured, and those beside them
    states   for each row [S, len(layers), H] float32, before the final norm; the last layer is always the last block
    norm     the model's final norm, on the CPU
    """

    rows: list[Ids]
    layers: tuple[int, ...]
    states: list[npt.NDArray[np.float32]]
    norm: nn.Module


def probe_rows(input_ids: Ids, longest: int, max_positions: int | None) -> list[Ids]:
    """The rows of the probe, from the tokens of the data (repeated where these are few), of which a row has `longest` at most."""
    wanted = [max(LENGTHS[0], min(longest, MOST_TOKENS)), LENGTHS[1]]
    lengths = [length if max_positions is None else min(length, max_positions) for length in wanted]
    ids = np.resize(input_ids, sum(lengths)).astype(np.int32)
    return np.split(ids, np.cumsum(lengths)[:-1])


def make_reference(path: Path, model: ModelConfig, info: ModelInfo, layers: Sequence[int], rows: Sequence[Ids]) -> None:
    """Write to `path` what transformers gives for `rows`, unless the file exists. Raises InputError for a model that cannot be loaded,
    or not tapped before its final norm."""
    with waiting_lock(path.with_suffix(".lock")):
        if path.exists():
            return
        near = {layer + step for layer in layers for step in (-1, 0, 1)} | {info.num_layers - 2, info.num_layers - 1}
        wanted = sorted(layer for layer in near if EMBEDDINGS <= layer < info.num_layers)
        device = torch.device(resolve_device(model)[0])
        reader = load_taps_reader(model, info, device, wanted, "pre")
        final = reader.final_norm or nn.Identity()
        norm = (
            "" if isinstance(final, nn.Identity) else next(name for name, one in reader.model.named_modules() if one is final)
        )
        tensors = {f"norm.{name}": value.cpu().contiguous() for name, value in final.state_dict().items()}
        widen_where_needed(reader, info, device)
        try:
            with torch.inference_mode():
                for at, row in enumerate(rows):
                    states, output = reader.run(torch.from_numpy(row.astype(np.int64)).to(device)[None])
                    tensors[f"row.{at}"] = torch.from_numpy(row)
                    tensors[f"states.{at}"] = states[0, :, :-1].float().cpu().contiguous()
                    tensors[f"post.{at}"] = output.last_hidden_state[0].float().cpu().contiguous()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{device} has no memory left for the probe's {max(map(len, rows))} tokens: {error}\nGive --gpu-memory-gb: it caps "
                "what transformers takes for the probe; the other weights run from the CPU."
            ) from error
        del reader, final, states, output
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine takes most of the GPU
        from safetensors.torch import save

        with publishing(path) as file:
            file.write(save(tensors, {"layers": json.dumps(wanted), "norm": norm, "rows": str(len(rows))}))


def read_reference(path: Path, model: ModelConfig, info: ModelInfo) -> Reference:
    """What `make_reference` has written. Raises InputError where the final norm cannot be built from it."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        said = file.metadata()
        count = int(said["rows"])
        rows = [file.get_tensor(f"row.{at}").numpy() for at in range(count)]
        states = [file.get_tensor(f"states.{at}") for at in range(count)]
        posts = [file.get_tensor(f"post.{at}") for at in range(count)]
        weights = {name[5:]: file.get_tensor(name) for name in file.keys() if name.startswith("norm.")}  # noqa: SIM118
    norm: nn.Module = nn.Identity()
    if said["norm"]:
        norm = empty_part(model, info).get_submodule(said["norm"])
        norm.load_state_dict(weights, assign=True)
        norm = norm.eval().requires_grad_(False)
    dtype = getattr(torch, info.dtype)
    with torch.inference_mode():
        for given, post in zip(states, posts, strict=True):
            made = norm(given[None, :, -1].to(dtype))[0].float()
            if (error := float((made - post).norm() / post.norm().clamp(min=1e-30))) > ALIKE[info.dtype]:
                raise InputError(
                    f"model {info.model!r}: its final norm {said['norm']!r}, applied alone, is {error:.2%} off what the whole model "
                    "gives. Give --last-hidden-norm pre, or --runner transformers."
                )
    return Reference(rows, tuple(json.loads(said["layers"])), [one.numpy() for one in states], norm)


def compare(
    reference: Reference, found: Sequence[npt.NDArray[np.float32]], layers: Sequence[int], dtype: str
) -> dict[str, Any]:
    """How near the engine's states `found` ([S, len(layers), H] of each row, of block ids `layers`) are to the reference's; JSON-able.

    `cosine` is the lowest of all stretches and layers, `relative_error` the largest of all layers. Raises InputError for states that are
    not those of their layers.
    """
    lowest, largest = 1.0, 0.0
    judge = np.min if dtype == "float32" else np.median
    for at, layer in enumerate(layers):
        own, beside = reference.layers.index(layer), [reference.layers.index(near) for near in _near(layer, reference)]
        errors, errors_beside = [], {place: list[npt.NDArray[np.float64]]() for place in beside}
        for row, (given, true) in enumerate(zip(found, reference.states, strict=True)):
            if not np.isfinite(given[:, at]).all():
                raise InputError(f"layer {layer}: NaN or Inf in row {row} of the probe.")
            cosine = cosines(given[:, at], true[:, own], of_zeros=0.0)
            for start in range(0, len(cosine), STRETCH):
                value = float(judge(cosine[start : start + STRETCH]))
                lowest = min(lowest, value)
                if value < FLOORS[dtype]:
                    raise InputError(
                        f"layer {layer}: tokens {start} to {min(start + STRETCH, len(cosine)) - 1} of a probe row of {len(cosine)} tokens "
                        f"have cosine {value:.5f} to what transformers gives (expected at least {FLOORS[dtype]} in {dtype})."
                    )
            errors.append(_relative(given[:, at], true[:, own]))
            for place in beside:
                errors_beside[place].append(_relative(given[:, at], true[:, place]))
        error = float(np.median(np.concatenate(errors)))
        largest = max(largest, error)
        for place in beside:
            other = float(np.median(np.concatenate(errors_beside[place])))
            if error > ALIKE[dtype] and error > other / 2:
                raise InputError(
                    f"layer {layer}: {error:.2%} off what transformers gives for it, and {other:.2%} off layer "
                    f"{reference.layers[place]}: which of the two it is cannot be told."
                )
    tokens = sum(map(len, reference.rows))
    return {
        "rows": len(reference.rows),
        "tokens": tokens,
        "cosine": round(lowest, 6),
        "relative_error": float(f"{largest:.1e}"),
    }


def _near(layer: int, reference: Reference) -> list[int]:
    return [near for near in (layer - 1, layer + 1) if near in reference.layers]


def _relative(given: npt.NDArray[np.float32], true: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The relative error of each vector, [S]."""
    scale = np.maximum(np.linalg.norm(true, axis=-1), 1e-30)
    error: npt.NDArray[np.float64] = (np.linalg.norm(given - true, axis=-1) / scale).astype(np.float64)
    return error
