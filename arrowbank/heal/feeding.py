"""What the draft is fed at steps beyond the first: computed from the current draft every so often, and kept in a mapped file.

Chains: the draft's own output at every step but the last, [chain − 1, windows, T, H]. Rounds: the trunk's states with those of rows
in a round replaced, [1, windows, T, H]. They are kept as the trunk bank keeps hidden states, which is also how a server holds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from arrowbank.bank.files import require_space, reserve
from arrowbank.bank.trunk import HIDDEN_TYPES
from arrowbank.heal.windows import WindowBatch, Windows
from arrowbank.mtp.draft import Draft
from arrowbank.mtp.unroll import chain, rounds


class Feeding:
    """The inputs of windows `rows` at all steps of a chain, or in rounds (`stride`)."""

    def __init__(self, path: Path, windows: Windows, rows: Sequence[int], *, steps: int, stride: int, batch: int) -> None:
        self._windows, self._rows, self._steps, self._stride, self._batch = windows, rows, steps, stride, batch
        self._place = {int(row): at for at, row in enumerate(rows)}
        bank = windows.bank
        self._torch_dtype = getattr(torch, str(bank.manifest["hidden_dtype"]))
        kept = 1 if stride else steps - 1
        shape = (kept, len(rows), bank.window_tokens, bank.hidden_size)
        dtype = HIDDEN_TYPES[str(bank.manifest["hidden_dtype"])]
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
        fill = int(self._windows.bank.manifest["pad_id"])
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
