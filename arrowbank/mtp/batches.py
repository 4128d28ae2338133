"""Windows of a trunk bank as the tensors that training and measuring take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from arrowbank.bank.files import require_space, reserve
from arrowbank.bank.kinds.trunk_bank import HIDDEN_TYPES, TrunkBank
from arrowbank.errors import InputError
from arrowbank.mtp.draft import Draft, chain, rounds


@dataclass(frozen=True)
class WindowBatch:
    """N windows of up to T tokens, padded behind. Everything on the draft's device but `lengths`.

    input_ids [N, T] int64 · lengths [N] · topk_ids [N, T, k] int64 and topk_probs [N, T, k] float32 (0 past the end) · hidden
    [N, T, H], the trunk's, on the side that the draft is fed.
    """

    rows: tuple[int, ...]
    input_ids: torch.Tensor
    lengths: npt.NDArray[np.int64]
    topk_ids: torch.Tensor
    topk_probs: torch.Tensor
    hidden: torch.Tensor

    @property
    def choices(self) -> torch.Tensor:
        """The trunk's own next token at every row, [N, T]."""
        return self.topk_ids[..., 0]

    def real(self, ahead: int) -> torch.Tensor:
        """Which rows [N, T] have a real row `ahead` further on: the one that their target is taken from."""
        places = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        return places + ahead < torch.from_numpy(self.lengths).to(self.input_ids.device)[:, None]


class DraftWindows:
    """The windows of `bank` for `draft`. Raises InputError where the bank's hidden states are not those that the draft is fed."""

    def __init__(self, bank: TrunkBank, draft: Draft) -> None:
        self.bank, self._draft = bank, draft
        self.norm = bank.manifest.hidden_norm
        if self.norm == "post" and draft.hidden == "pre":
            raise InputError(
                f"{bank.folder}: holds hidden states after the final norm, this draft is fed those before it. Build the bank with "
                "--last-hidden-norm pre (which serves both), or give --last-hidden-norm post."
            )

    def batch(self, rows: Sequence[int], *, hidden: str | None = None) -> WindowBatch:
        """Windows `rows`; `hidden`: the side of the trunk's norm, where not the draft's."""
        windows = [self.bank.read(int(row)) for row in rows]
        device, width = self._draft.trunk.device, self.bank.window_tokens
        states = torch.nn.utils.rnn.pad_sequence([window.hidden_tensor() for window in windows], batch_first=True)
        states = torch.nn.functional.pad(states, (0, 0, 0, width - states.shape[1])).to(device)
        if self.norm == "pre" and (hidden or self._draft.hidden) == "post":
            with torch.no_grad():
                states = self._draft.trunk.norm(states.to(self._draft.trunk.dtype))
        return WindowBatch(
            tuple(int(row) for row in rows),
            torch.from_numpy(np.stack([window.input_ids for window in windows]).astype(np.int64)).to(device),
            np.array([window.length for window in windows]),
            torch.from_numpy(_padded([window.topk_ids for window in windows], width, np.int64)).to(device),
            torch.from_numpy(_padded([window.topk_probs for window in windows], width, np.float32)).to(device),
            states,
        )

    def batches(self, rows: Sequence[int], size: int, *, hidden: str | None = None) -> Iterator[WindowBatch]:
        """Windows `rows`, `size` at a time."""
        for start in range(0, len(rows), size):
            yield self.batch(rows[start : start + size], hidden=hidden)


def _padded(parts: Sequence[npt.NDArray[Any]], width: int, dtype: type) -> npt.NDArray[Any]:
    out: npt.NDArray[Any] = np.zeros((len(parts), width, parts[0].shape[1]), dtype)
    for row, part in enumerate(parts):
        out[row, : len(part)] = part
    return out


def fed_shape(bank: TrunkBank, rows: Sequence[int], *, steps: int, stride: int) -> tuple[int, int, int, int]:
    """The shape of what `Feeding` keeps of windows `rows`: 16-bit numbers."""
    return 1 if stride else steps - 1, len(rows), bank.window_tokens, bank.hidden_size


class Feeding:
    """The inputs of windows `rows` at all steps of a chain, or in rounds (`stride`)."""

    def __init__(self, path: Path, windows: DraftWindows, rows: Sequence[int], *, steps: int, stride: int, batch: int) -> None:
        self._windows, self._rows, self._steps, self._stride, self._batch = windows, rows, steps, stride, batch
        self._place = {int(row): at for at, row in enumerate(rows)}
        bank = windows.bank
        self._torch_dtype = getattr(torch, bank.manifest.hidden_dtype)
        shape = fed_shape(bank, rows, steps=steps, stride=stride)
        dtype = HIDDEN_TYPES[bank.manifest.hidden_dtype]
        self._kept = None
        if math.prod(shape):
            path.unlink(missing_ok=True)
            size = math.prod(shape) * dtype.itemsize
            require_space(path.parent, size, "what the later steps of a chain are fed")
            reserve(path, size)
            self._kept = np.memmap(path, dtype, mode="r+", shape=shape)

    @torch.no_grad()
    def refresh(self, draft: Draft, count: int) -> None:
        """Compute everything anew from `draft`; `count` is how often that has been done, which moves the offset of rounds."""
        if self._kept is None:
            return
        fill = self._windows.bank.manifest.pad_id
        if self._stride:
            for row in self._rows:  # one by one: each window has an offset of its own
                part = self._windows.batch([int(row)])
                offset = (int(row) + count) % self._stride
                how = {"steps": self._steps, "stride": self._stride, "offset": offset, "fill": fill}
                self._keep(0, part, rounds(draft, part.input_ids, part.hidden, **how)[0])
            return
        for part in self._windows.batches(self._rows, self._batch):
            outputs = chain(draft, part.input_ids, part.hidden, steps=self._steps - 1, fill=fill)
            for step, out in enumerate(outputs):
                self._keep(step, part, out.side(draft.recycle))

    def of(self, part: WindowBatch, step: int) -> torch.Tensor:
        """What the draft is fed at chain step `step` (0: in rounds) of these windows, [N, T, H]."""
        if step == 1 or self._kept is None:
            return part.hidden
        values = self._kept[max(step - 2, 0), [self._place[row] for row in part.rows]]
        tensor = torch.from_numpy(values.view(np.int16)).view(self._torch_dtype)
        return tensor.to(part.hidden.device)

    def _keep(self, step: int, part: WindowBatch, states: torch.Tensor) -> None:
        if self._kept is None:
            return
        values = states.to(self._torch_dtype).cpu().contiguous().view(torch.int16).numpy().view(self._kept.dtype)
        self._kept[step, [self._place[row] for row in part.rows]] = values
