"""A model folder's tensors, straight from its safetensors, single or sharded: names and shapes first, values when asked for."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arrowbank.bank.manifest import parsed_json
from arrowbank.errors import InputError
from arrowbank.formats.safetensors import SafetensorsFile
from arrowbank.models.source import read_json, weight_files
from arrowbank.mtp.codecs import ABSMAX, DTYPES, SCALE, SHAPE, decode, is_part, stored_codec
from arrowbank.mtp.layouts import FoundLayout, find_layout, match_layout

PROVENANCE = "arrowbank.mtp"
_SUFFIXES = {"keep": ("",), "int8": ("", SCALE), "nf4": ("", ABSMAX, SHAPE)}


class Checkpoint:
    """The weights under `folder`. Raises InputError for a folder without safetensors, or with a torn one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path: SafetensorsFile(path) for path in weight_files(folder) if path.suffix == ".safetensors"}
        self.place = {name: path for path, file in self.files.items() for name in file.tensors}
        self.dtypes = {name: self.files[path].tensors[name].dtype for name, path in self.place.items()}

    @cached_property
    def num_layers(self) -> int:
        """The number of the trunk's layers, from config.json."""
        config = read_json(self.folder / "config.json")
        texts = [
            config,
            *(config[key] for key in ("text_config", "llm_config", "language_config") if isinstance(config.get(key), dict)),
        ]
        found: list[Any] = [part["num_hidden_layers"] for part in texts if "num_hidden_layers" in part]
        if not found or type(found[-1]) is not int:
            raise InputError(f"{self.folder / 'config.json'} names no num_hidden_layers; expected the config of a text model")
        return int(found[-1])

    def layout(self, number: int = 0) -> FoundLayout:
        """The layout of the draft in here. Raises InputError if there is none, or one that is not known."""
        return find_layout(self.names, self.num_layers, where=self.folder, number=number)

    def known_layout(self, number: int = 0) -> FoundLayout | None:
        """The layout of the draft in here; None if there is none of a known one."""
        return match_layout(self.names, self.num_layers, number=number)

    @cached_property
    def names(self) -> set[str]:
        """All tensors' names, without the scales and shapes that belong to encoded ones."""
        return {name for name in self.place if not is_part(name, self.place)}

    def record(self) -> dict[str, Any] | None:
        """What `save_draft` wrote about the draft in here; None where it did not. InputError if it is not a JSON object."""
        for path, file in self.files.items():
            text = file.metadata.get(PROVENANCE)
            if text is None:
                continue
            try:
                return dict(parsed_json(text.encode()))
            except (ValueError, TypeError) as error:
                raise InputError(
                    f"{path}: its record {PROVENANCE!r} is not a JSON object ({error}). Write the draft again."
                ) from None
        return None

    def codec(self, name: str) -> str:
        """By what a tensor is stored: keep, int8 or nf4. Raises InputError for a dtype that a draft cannot be read from."""
        codec = stored_codec(name, self.dtypes)
        if codec is None:
            raise InputError(
                f"{self.place[name]}: tensor {name} is stored as {self.dtypes[name]}; expected F32, F16 or BF16, or the int8 or "
                "nf4 that arrowbank writes. Give a checkpoint whose draft is not quantised by another tool."
            )
        return codec

    def parts(self, name: str) -> list[str]:
        """The names of all that is stored of a tensor: itself, and where it is encoded its scale or shape."""
        return [name + suffix for suffix in _SUFFIXES[self.codec(name)]]

    def read(self, name: str) -> torch.Tensor:
        """A tensor's values on the CPU, decoded where it is encoded (to float32), else in its own dtype."""
        return decode(name, {part: self.raw(part) for part in self.parts(name)}, self.codec(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, of its values."""
        if self.codec(name) == "nf4":
            return tuple(int(size) for size in self.raw(name + SHAPE).tolist())
        return self.files[self.place[name]].tensors[name].shape

    def stored_bytes(self, name: str) -> int:
        """How many bytes are stored of a tensor, with its scales."""
        entries = [self.files[self.place[part]].tensors[part] for part in self.parts(name)]
        return sum(entry.stop - entry.start for entry in entries)

    def raw(self, name: str) -> torch.Tensor:
        """What is stored under a name, as it is, on the CPU."""
        file = self.files[self.place[name]]
        tensor = file.tensors[name]
        values = torch.from_numpy(np.array(file.raw(tensor)))  # a copy: torch cannot have the map itself
        return values.view(DTYPES[tensor.dtype]).view(tensor.shape)

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are stored with the same dtype, shape and bytes."""
        one, two = (self.files[self.place[each]] for each in (name, other))
        first, second = one.tensors[name], two.tensors[other]
        return (first.dtype, first.shape) == (second.dtype, second.shape) and np.array_equal(one.raw(first), two.raw(second))
