"""What decides how a draft is healed, checked without reading anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from arrowbank.errors import InputError
from arrowbank.models import ModelConfig
from arrowbank.mtp.checkpoint import Codec
from arrowbank.settings import Count, Flag, Natural, Place, Positive, Range, Settings, Share, given, refuse_unread

METHOD = 1  # raise it when the same data and options would train to other weights


@dataclass(frozen=True, kw_only=True)
class TrainingRules(Settings):
    """What only a training reads: `HealConfig` says what each is."""

    refresh: Count = 150
    lr: Positive = 2e-5
    eval_every: Count = 25
    patience: Count = 6
    hard: Share = 0.0


TRAINING = tuple(TrainingRules.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class HealConfig(Settings):
    """How the draft of `model` is trained, measured and written. With `epochs=0`, what only a training reads is refused.

    chain        steps that are trained and counted
    stride       0: every row is a chain; n ≥ chain: rounds as a server runs them, one every n rows
    refresh      steps between two computations of what later chain steps are fed (None: 150)
    epochs       passes over all jobs (a batch of windows at a chain step); 0 only measures
    lr, batch    the largest learning rate (None: 2e-5); windows a step
    eval_every, patience   steps between two measurements (None: 25); how many without a better one end the training (None: 6)
    hard         share of the teacher's mass that is moved to its first choice (None: 0)
    last_hidden_norm, recycle   which side of the norms the draft is fed; None: the checkpoint's, or its family's
    train_projection  train eh_proj as well
    init         begin with the trunk's last block; draft_from: with the draft of another checkpoint
    codec, also  how the draft is stored in `out`, and in further copies: (codec, folder) each
    in_order     also count rounds one after another
    """

    model: ModelConfig
    chain: Count = 3
    stride: Natural = 0
    refresh: Count | None = None
    epochs: Annotated[float, Range(least=0)] = 1.0
    lr: Positive | None = None
    batch: Count = 2
    eval_every: Count | None = None
    patience: Count | None = None
    hard: Share | None = None
    last_hidden_norm: Literal["post", "pre"] | None = None
    recycle: Literal["post", "pre"] | None = None
    train_projection: Annotated[bool, Flag("--train-proj")] = False
    init: bool = False
    draft_from: Place | None = None
    codec: Codec = "keep"
    also: tuple[tuple[Codec, Place], ...] = ()
    in_order: bool = False

    def check(self) -> None:
        if self.stride and self.stride < self.chain:
            raise InputError(f"--stride {self.stride} is shorter than --chain {self.chain}: give at least {self.chain}, or 0.")
        if not self.epochs:
            refuse_unread("--epochs 0", self, [*TRAINING, "train_projection"])
        if self.init and self.draft_from:
            raise InputError("--init and --draft-from both say where the draft begins: give one of them.")

    @property
    def training(self) -> TrainingRules:
        """How it is trained, defaults in place."""
        return TrainingRules(**given(self, TRAINING))

    def recipe(self) -> dict[str, Any]:
        """What decides the trained weights, beside the trunk bank, the model and the first draft."""
        decisive = ("chain", "stride", "epochs", "batch", "train_projection", "init")
        return {"method": METHOD, **{name: getattr(self, name) for name in decisive}, **asdict(self.training)}
