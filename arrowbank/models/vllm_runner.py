"""A model in vLLM: what runs the probe, and turns vLLM's states into those of a target bank or into the vectors of a feature bank.

vLLM gives states before the final norm, with layer ids one higher than ours; the norm is applied here. Every engine is probed before its
first shard (see `engine_probe`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from arrowbank.bank import BankWriter
from arrowbank.bank.files import publish_json
from arrowbank.bank.manifest import canonical_json
from arrowbank.engine.plan import BatchRules
from arrowbank.engine.stage import RunOptions
from arrowbank.errors import InputError
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.vllm_engine import GROUP_BYTES, EngineConfig, Vllm, find_vllm
from arrowbank.models.vllm_process import VllmChild
from arrowbank.models.vllm_server import VllmServer, find_server, states_folder
from arrowbank.progress import Progress
from arrowbank.settings import Help, refuse_unread

if TYPE_CHECKING:
    import torch

    from arrowbank.models.describe import ModelInfo
    from arrowbank.models.engine_probe import Reference

    Ids = npt.NDArray[np.int32]


Runner = Annotated[Literal["transformers", "vllm"], Help("What runs the model.")]


def check_runner(runner: str, engine: EngineConfig, model: ModelConfig | None, rules: BatchRules) -> None:
    """InputError for options that have no effect with `runner`."""
    if runner == "vllm":
        if model is None:
            raise InputError("--runner vllm: runs a --model (found --encoder). Leave one of them out.")
        refuse_unread("--runner vllm", model, ["load_in_4bit", "backbone"])
        refuse_unread("--runner vllm", rules, ["max_batch", "token_budget"])
    else:
        refuse_unread("--runner transformers", engine, [one.name for one in fields(engine)])


def find_engine(config: EngineConfig, model: ModelConfig, info: ModelInfo, layers: Sequence[int], norm: str) -> Vllm:
    """The engine that `config` asks for. Raises InputError where it is not there, or cannot run this model."""
    if info.adapter is not None:
        raise InputError(
            f"{info.adapter}: holds an adapter, which the engine would leave out without a word. Merge it into its model (peft's "
            "merge_and_unload), or use --runner transformers."
        )
    find = find_vllm if config.vllm_url is None else find_server
    return find(config, model, info, layers, norm)


def prepare_vllm(vllm: Vllm, bank: BankWriter, tokens: Ids, longest: int, options: RunOptions, progress: Progress) -> VllmJob:
    """Have transformers run the probe, where that has not been done for this plan; the job of the workers.

    `tokens` are the first MOST_TOKENS of the data, or as many as there are; `longest` is how many a row has at most. Raises InputError for
    more workers than GPUs.
    """
    if options.engine == "local" and vllm.device == "cuda" and (options.workers or 1) > vllm.workers:
        raise InputError(
            f"--workers {options.workers}: {vllm.devices} GPUs hold {vllm.workers} vLLM of --tensor-parallel "
            f"{vllm.config.tensor_parallel}. Give {vllm.workers} or fewer."
        )
    from arrowbank.models.engine_probe import make_reference, probe_rows

    bank.work_dir.mkdir(exist_ok=True)
    path = bank.work_dir / f"probe-{bank.plan_digest[:16]}.safetensors"
    probe = probe_rows(tokens, longest, vllm.info.max_positions)
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
        from arrowbank.models.engine_probe import read_reference

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

    def load_encoder(self, number: int) -> VllmEncoder:
        """The same, as vectors of texts."""
        return VllmEncoder(self.load(number), self.engine.info)


class VllmStates:
    """(N, T) int32 token ids → (N, T, L + 1, H) bfloat16 hidden states on the CPU: L tapped layers, then the last ones."""

    def __init__(self, engine: Vllm, source: VllmChild | VllmServer, reference: Reference) -> None:
        self._engine, self._source, self._reference = engine, source, reference
        ids = self._engine.engine_layers
        self._places = [ids.index(layer + 1) for layer in self._engine.layers]

    def stream(self, batches: Iterable[Ids]) -> Iterator[torch.Tensor]:
        """The hidden states of each batch, in order.

        Raises InputError where the engine dies, hangs, or gives anything else than the states of each row.
        """
        import torch

        for placed in self.stream_rows(batches):
            yield torch.stack(placed).to(torch.bfloat16)

    def stream_rows(self, batches: Iterable[Ids]) -> Iterator[list[torch.Tensor]]:
        """[S, L + 1, H] of each row of a batch, in the engine's dtype. Batches whose states take less than GROUP_BYTES are given to the
        engine at once, which schedules their rows as it likes."""
        group: list[Ids] = []
        size = 0
        for batch in batches:
            if group and size + batch.size * self._engine.token_bytes > GROUP_BYTES:
                yield from self._run(group)
                group, size = [], 0
            group.append(batch)
            size += batch.size * self._engine.token_bytes
        yield from self._run(group)

    def _run(self, group: Sequence[Ids]) -> Iterator[list[torch.Tensor]]:
        files = self._source.run([row for batch in group for row in batch])
        for batch in group:
            yield [self._placed(next(files)) for _ in batch]
        next(files, None)  # waits until the engine says that it has finished

    def probe(self) -> dict[str, Any]:
        """Hold the child's states against transformers': what `compare` gives. Raises InputError."""
        from arrowbank.models.engine_probe import compare

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
            with torch.inference_mode():
                last = self._reference.norm(last.transpose(0, 1)).transpose(0, 1)
        return torch.cat([states[:, self._places], last], dim=1)


class VllmEncoder:
    """(N, T) int32 token ids → (N, D) float32 vectors, or (N, T, D) with the pooling "none": not normalized, as `ModelEncoder` gives."""

    def __init__(self, states: VllmStates, info: ModelInfo) -> None:
        self._states, self.info, self.hidden_size = states, info, info.width

    def encode(self, input_ids_NT: Ids) -> npt.NDArray[np.float32]:
        [vectors] = self.encode_stream([input_ids_NT])
        return vectors

    def encode_stream(self, batches: Iterable[Ids]) -> Iterator[npt.NDArray[np.float32]]:
        import torch

        from arrowbank.models.pooling import heads_of, pool

        heads = heads_of(self.info)
        for placed in self._states.stream_rows(batches):
            with torch.inference_mode():
                vectors = heads(pool(torch.stack(placed)[:, :, -1], self.info.pooling)).numpy()
            yield vectors  # outside of the mode, which would be the caller's, too
