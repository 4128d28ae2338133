"""The training of a draft on a trunk bank: jobs, schedule, measurements, the best snapshot, and going on after a crash.

A job is a batch of windows at a chain step (or in rounds). Jobs are shuffled each epoch. What later steps are fed is computed from the
draft before training and again every `refresh` steps. The snapshot that is kept is the one that would be accepted most.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arrowbank.bank.files import publish_bytes
from arrowbank.errors import BadVector
from arrowbank.heal.config import HealConfig
from arrowbank.heal.feeding import Feeding
from arrowbank.heal.measure import Measured, measure
from arrowbank.heal.state import STATE, Progressed, load_state, save_state
from arrowbank.heal.windows import Windows
from arrowbank.mtp.draft import Draft
from arrowbank.mtp.loss import topk_kl
from arrowbank.mtp.unroll import step_tokens
from arrowbank.progress import Progress
from arrowbank.shuffle import shuffled, xorshift64

TRACE, FED = "trace.jsonl", "fed.bin"
MAX_SKIPPED = 20
CLIP = 1.0
LEAST_LR = 0.1
ROLES = ("now", "best", "fed")


@dataclass(frozen=True)
class Job:
    """A batch of windows (rows of the bank) at a chain step; step 0: in rounds."""

    rows: tuple[int, ...]
    step: int


def jobs_of(rows: Sequence[int], config: HealConfig) -> list[Job]:
    """All jobs of an epoch, unshuffled."""
    batches = [tuple(int(row) for row in rows[start : start + config.batch]) for start in range(0, len(rows), config.batch)]
    steps = (0,) if config.stride else range(1, config.chain + 1)
    return [Job(batch, step) for batch in batches for step in steps]


def ordered(jobs: Sequence[Job], epochs: float) -> Iterator[Job]:
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
        windows: Windows,
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

    def _step(self, job: Job) -> None:
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

    def loss(self, job: Job) -> torch.Tensor:
        """The mean loss over the real rows of a job."""
        part = self.windows.batch(job.rows)
        ahead = max(job.step, 1)  # in rounds every row predicts the token after the next
        fill = int(self.windows.bank.manifest["pad_id"])
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
