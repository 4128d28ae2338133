"""What a training needs to go on after a crash to the same result: in one safetensors file, published whole at each measurement."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from arrowbank.bank.files import publish_bytes, publishing
from arrowbank.bank.manifest import parsed_json
from arrowbank.bank.refusals import raise_refusal
from arrowbank.errors import BadVector, CorruptBank
from arrowbank.formats.safetensors import write_safetensors
from arrowbank.mtp.batches import DraftWindows, Feeding
from arrowbank.mtp.checkpoint import NAMES
from arrowbank.mtp.draft import Draft, step_tokens
from arrowbank.mtp.heal_config import HealConfig
from arrowbank.mtp.loss import topk_kl
from arrowbank.mtp.measure import Measured, measure
from arrowbank.mtp.trace import TRACE
from arrowbank.mtp.trunk_records import shuffled, xorshift64
from arrowbank.progress import Progress

STATE = "state.safetensors"


@dataclass
class Progressed:
    """Where a training is. `trace` has a line a measurement; `since_best` measurements ago was the best one; `losses` since the last."""

    step: int = 0
    refreshes: int = 0
    skipped: int = 0
    best_score: float = -1.0
    best_step: int = 0
    since_best: int = 0
    stopped: bool = False
    trace: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def save_state(
    folder: Path,
    progressed: Progressed,
    *,
    weights: Mapping[str, Mapping[str, torch.Tensor]],
    optimizer: torch.optim.Adam,
    parameters: Sequence[torch.nn.Parameter],
    plan: str,
) -> None:
    """Publish the state: `weights` by role (now, best, fed), and the optimiser's moments of `parameters` in their order; with the digest
    of the `plan` that it is of.

    Weights that two roles share (the same mapping, as now and best after a better measurement) are written once.
    """
    tensors: dict[str, torch.Tensor] = {}
    whose = {role: next(other for other in weights if weights[other] is named) for role, named in weights.items()}
    for role, named in weights.items():
        if whose[role] == role:
            tensors |= {f"{role}.{name}": tensor for name, tensor in named.items()}
    for index, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            tensors[f"adam.{index}.{name}"] = value.detach().cpu()
    metadata = {"progressed": json.dumps(asdict(progressed)), "weights": json.dumps(whose), "plan": plan}
    with publishing(folder / STATE, hash=None) as file:
        stored = {name: (NAMES[tensor.dtype], tensor.shape, _bits(tensor)) for name, tensor in tensors.items()}
        write_safetensors(file, stored, metadata)


def plan_of(folder: Path) -> str | None:
    """The digest of the plan that the state in `folder` is of; None where there is none that can be read."""
    try:
        with safe_open(folder / STATE, framework="pt") as file:
            return (file.metadata() or {}).get("plan")
    except (OSError, SafetensorError) as error:
        raise_refusal(error, folder / STATE)
        return None


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's own memory as an array; of bfloat16, which NumPy has not, the bits."""
    return (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def load_state(
    folder: Path, *, roles: Sequence[str], optimizer: torch.optim.Adam, parameters: Sequence[torch.nn.Parameter]
) -> tuple[Progressed, dict[str, dict[str, torch.Tensor]]] | None:
    """The state in `folder`, the moments put into `optimizer`; None where there is none, or one that a power cut has damaged."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, Any] = file.metadata() or {}
            progressed = Progressed(**parsed_json(metadata["progressed"].encode(), strict=False))
            whose = parsed_json(metadata["weights"].encode())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, CorruptBank) as error:
        raise_refusal(error, path)
        return None
    for index, parameter in enumerate(parameters):
        prefix = f"adam.{index}."
        moments = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if moments:
            optimizer.state[parameter] = {
                name: value if name == "step" else value.to(parameter.device) for name, value in moments.items()
            }
    weights = {
        role: {name.removeprefix(f"{role}."): value for name, value in tensors.items() if name.startswith(f"{role}.")}
        for role in set(whose.values())
    }
    return progressed, {role: weights[whose[role]] for role in roles}


FED = "fed.bin"
MAX_SKIPPED = 20
CLIP = 1.0
LEAST_LR = 0.1
ROLES = ("now", "best", "fed")


@dataclass(frozen=True)
class ChainBatch:
    """A batch of windows (rows of the bank) at a chain step; step 0: in rounds."""

    rows: tuple[int, ...]
    step: int


def jobs_of(rows: Sequence[int], config: HealConfig) -> list[ChainBatch]:
    """All jobs of an epoch, unshuffled."""
    batches = [tuple(int(row) for row in rows[start : start + config.batch]) for start in range(0, len(rows), config.batch)]
    steps = (0,) if config.stride else range(1, config.chain + 1)
    return [ChainBatch(batch, step) for batch in batches for step in steps]


def ordered(jobs: Sequence[ChainBatch], epochs: float) -> Iterator[ChainBatch]:
    """ceil(epochs × jobs) jobs, shuffled anew each epoch by numbers that go on through all of them."""
    numbers, left = xorshift64(), math.ceil(epochs * len(jobs))
    while left > 0:
        for at in shuffled(len(jobs), numbers)[:left]:
            yield jobs[at]
        left -= len(jobs)


def learning_rate(step: int, steps: int, lr: float) -> float:
    """Linear over the first tenth of the steps, then a cosine down to a tenth of `lr`."""
    warm = max(1, steps // 10)
    if step < warm:
        return lr * (step + 1) / warm
    turn = (step - warm) / max(1, steps - 1 - warm)
    return lr * (LEAST_LR + (1 - LEAST_LR) * (1 + math.cos(math.pi * min(turn, 1.0))) / 2)


class Training:
    """One training. `rows` are trained on, `held_out` measured on; `folder` keeps state and trace of the
    plan with the digest `plan`."""

    def __init__(
        self,
        config: HealConfig,
        draft: Draft,
        windows: DraftWindows,
        rows: Sequence[int],
        held_out: Sequence[int],
        folder: Path,
        plan: str,
    ) -> None:
        self.config, self.draft, self.windows, self.held_out = config, draft, windows, held_out
        self.folder, self.plan = folder, plan
        self.rules = config.training
        self.jobs = list(ordered(jobs_of(rows, config), config.epochs))
        self.parameters = draft.train_only(projection=config.train_projection)
        self.optimizer = torch.optim.Adam(self.parameters, self.rules.lr, betas=(0.9, 0.999), eps=1e-8)
        self.feeding = Feeding(folder / FED, windows, rows, steps=config.chain, stride=config.stride, batch=config.batch)
        self.at = Progressed()
        self.weights = dict.fromkeys(ROLES, draft.weights())

    def run(self, progress: Progress) -> None:
        """Train to the end, or until `patience` measurements brought nothing; the draft then has the best weights.

        Raises BadVector when too many steps gave a loss or gradients that are not finite.
        """
        self._resume(progress)
        with progress.phase("heal", len(self.jobs), unit="steps") as phase:
            phase.advance(self.at.step)
            if not self.at.trace:
                self._measure()
            while self.at.step < len(self.jobs) and not self.at.stopped:
                if self.at.step % self.rules.refresh == 0:
                    self._refresh()
                self._step(self.jobs[self.at.step])
                self.at.step += 1
                if self.at.step % self.rules.eval_every == 0 or self.at.step == len(self.jobs):
                    self._measure()
                phase.advance(1)
        if self.at.stopped:
            progress.message(f"no better for {self.rules.patience} measurements: stopped at step {self.at.step}")
        self.draft.set_weights(self.weights["best"])

    def _resume(self, progress: Progress) -> None:
        found = load_state(self.folder, roles=ROLES, optimizer=self.optimizer, parameters=self.parameters)
        if found is None:
            if (self.folder / STATE).exists():
                progress.message(f"{self.folder / STATE}: not readable, as after a power cut: the training begins again")
            return
        self.at, self.weights = found
        self._publish_trace()
        ended = self.at.stopped or self.at.step == len(self.jobs)
        if self.at.step % self.rules.refresh and not ended:  # what was fed when the run was killed
            self.draft.set_weights(self.weights["fed"])
            self.feeding.refresh(self.draft, self.at.refreshes - 1)
        self.draft.set_weights(self.weights["now"])
        progress.message(f"going on from step {self.at.step} of {len(self.jobs)}")

    def _refresh(self) -> None:
        self.weights["fed"] = self.draft.weights()
        self.feeding.refresh(self.draft, self.at.refreshes)
        self.at.refreshes += 1

    def _step(self, job: ChainBatch) -> None:
        rate = learning_rate(self.at.step, len(self.jobs), self.rules.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(job)
        if torch.isfinite(loss):
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            if torch.isfinite(norm):
                self.optimizer.step()
                self.at.losses.append(float(loss.detach()))
                return
        self.at.skipped += 1
        if self.at.skipped >= MAX_SKIPPED:
            raise BadVector(
                f"step {self.at.step}: {self.at.skipped} steps gave a loss or gradients that are NaN or Inf. Nothing was written. "
                "Give a smaller --lr, or --dtype float32, and check the draft's weights."
            )

    def loss(self, job: ChainBatch) -> torch.Tensor:
        """The mean loss over the real rows of a job."""
        part = self.windows.batch(job.rows)
        ahead = max(job.step, 1)  # in rounds every row predicts the token after the next
        fill = self.windows.bank.manifest.pad_id
        out = self.draft(step_tokens(part.input_ids, ahead, fill), self.feeding.of(part, job.step))
        width = part.input_ids.shape[1] - ahead
        real = part.real(ahead)[:, :width]
        return topk_kl(
            out.post[:, :width][real],
            self.draft.head_weight,
            part.topk_ids[:, ahead:][real],
            part.topk_probs[:, ahead:][real],
            bias_V=self.draft.head_bias,
            hard=self.rules.hard,
        ).mean()

    def _measure(self) -> None:
        config = self.config
        found = measure(self.draft, self.windows, self.held_out, chain=config.chain, stride=config.stride, batch=config.batch)
        self.weights["now"] = self.draft.weights()
        if found.whole.score > self.at.best_score:
            self.at.best_score, self.at.best_step, self.at.since_best = found.whole.score, self.at.step, 0
            self.weights["best"] = self.weights["now"]
        else:
            self.at.since_best += 1
            self.at.stopped = self.at.since_best >= self.rules.patience
        self.at.trace.append(self._line(found))
        self.at.losses = []
        save_state(
            self.folder, self.at, weights=self.weights, optimizer=self.optimizer, parameters=self.parameters, plan=self.plan
        )
        self._publish_trace()

    def _line(self, found: Measured) -> dict[str, Any]:
        """What the trace says of this step; the loss is the mean since the line before."""
        losses = self.at.losses
        return {
            "step": self.at.step,
            "steps": len(self.jobs),
            "loss": sum(losses) / len(losses) if losses else None,
            "lr": learning_rate(self.at.step, len(self.jobs), self.rules.lr),
            "skipped": self.at.skipped,
            "best_step": self.at.best_step,
            **found.record(),
        }

    def _publish_trace(self) -> None:
        """The trace as a file to look at; what counts is the one in the state."""
        publish_bytes(self.folder / TRACE, "".join(json.dumps(line) + "\n" for line in self.at.trace).encode())
