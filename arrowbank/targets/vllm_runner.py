"""Capture through vLLM: what runs the probe, and turns vLLM's states into those of a target bank.

vLLM gives states before the final norm, with layer ids one higher than ours; the norm is applied here. Every engine is probed before its
first shard (see `engine_probe`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from arrowbank.bank import BankWriter
from arrowbank.bank.files import publish_json
from arrowbank.bank.manifest import canonical_json
from arrowbank.errors import InputError
from arrowbank.progress import Progress
from arrowbank.targets.target_rows import PreparedRows
from arrowbank.targets.vllm_engine import Vllm
from arrowbank.targets.vllm_process import VllmChild
from arrowbank.targets.vllm_server import VllmServer, states_folder

if TYPE_CHECKING:
    import torch

    from arrowbank.targets.engine_probe import Reference

    Ids = npt.NDArray[np.int32]


def prepare_vllm(vllm: Vllm, bank: BankWriter, rows: PreparedRows, progress: Progress) -> VllmJob:
    """Have transformers run the probe, where that has not been done for this plan; the job of the workers."""
    from arrowbank.targets.engine_probe import MOST_TOKENS, make_reference, probe_rows

    path = bank.work_dir / f"probe-{bank.plan_digest[:16]}.safetensors"
    longest = int(rows.lengths.max())
    probe = probe_rows(rows.first_tokens(MOST_TOKENS), longest, vllm.info.max_positions)
    if not path.exists():
        progress.message(
            f"vLLM {vllm.version}: transformers runs {sum(map(len, probe)):,} tokens to hold vLLM's states against"
        )
    make_reference(path, vllm.model, vllm.info, vllm.layers, probe)
    return VllmJob(
        engine=vllm,
        folder=bank.work_dir,
        states=states_folder(bank.folder),
        reference=path,
        max_model_len=max(longest, *map(len, probe)) + 1,  # room for the one token that it makes
    )


@dataclass(frozen=True, kw_only=True)
class VllmJob:
    """How a worker gets its engine. Everything here pickles.

    folder          where scratch folders and results of probes go
    states          where a server writes
    reference       the file of the probe
    max_model_len   tokens that a row may have, and one
    """

    engine: Vllm
    folder: Path
    states: Path
    reference: Path
    max_model_len: int

    def load(self, number: int) -> VllmStates:
        """The states that worker `number`'s child gives: started, and probed. Raises InputError."""
        from arrowbank.targets.engine_probe import read_reference

        reference = read_reference(self.reference, self.engine.model, self.engine.info)
        source: VllmChild | VllmServer
        if self.engine.config.vllm_url is None:
            source = VllmChild(self.engine, self.folder, self.max_model_len, number)
        else:
            source = VllmServer(self.engine, self.states, self.max_model_len)
        states = VllmStates(self.engine, source, reference)
        result = states.probe()
        name = hashlib.sha256(canonical_json(result)).hexdigest()[:16]  # workers of several machines share the folder
        publish_json(self.folder / f"probe-result-{name}.json", result)
        return states


class VllmStates:
    """(N, T) int32 token ids → (N, T, L + 1, H) bfloat16 hidden states on the CPU: L tapped layers, then the last ones."""

    def __init__(self, engine: Vllm, source: VllmChild | VllmServer, reference: Reference) -> None:
        self._engine, self._source, self._reference = engine, source, reference
        ids = self._engine.engine_layers
        self._places = [ids.index(layer + 1) for layer in self._engine.layers]

    def stream(self, batches: Iterable[Ids]) -> Iterator[torch.Tensor]:
        """The hidden states of each batch, in order. All of them are given to the child at once, which schedules them as it likes.

        Raises InputError where the child dies, hangs, or gives anything else than the states of each row.
        """
        import torch

        plan = list(batches)
        files = self._source.run([row for batch in plan for row in batch])
        with torch.inference_mode():
            for batch in plan:
                yield torch.stack([self._placed(next(files)) for _ in batch])
        next(files, None)  # waits until the child says that it has finished

    def probe(self) -> dict[str, Any]:
        """Hold the child's states against transformers': what `compare` gives. Raises InputError."""
        from arrowbank.targets.engine_probe import compare

        found = [states.float().numpy() for states in self._source.run(self._reference.rows)]
        layers = [layer - 1 for layer in self._engine.engine_layers]
        try:
            result = compare(self._reference, found, layers, self._engine.info.dtype)
        except InputError as error:
            raise InputError(
                f"model {self._engine.info.model!r}: vLLM {self._engine.version} does not compute what transformers computes: {error} "
                "Nothing was kept. A kernel of vLLM may be wrong on this device: try another version, device or --dtype, or use "
                "--runner transformers."
            ) from None
        return {**result, "block_size": self._source.block_size}

    def _placed(self, states: torch.Tensor) -> torch.Tensor:
        """[S, ids, H] as the engine gives them → [S, L + 1, H]."""
        import torch

        last = states[:, -1:]
        if self._engine.norm == "post":
            last = self._reference.norm(last.transpose(0, 1)).transpose(0, 1)
        return torch.cat([states[:, self._places], last], dim=1).to(torch.bfloat16)
