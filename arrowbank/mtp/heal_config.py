"""What decides how a draft is healed, checked without reading anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from arrowbank.errors import InputError
from arrowbank.models import ModelConfig
from arrowbank.settings import (
    Count,
    Group,
    Help,
    Natural,
    Old,
    Part,
    Place,
    Positive,
    Range,
    Settings,
    Share,
    given,
    refuse_unread,
    require_one,
)

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


TRAIN, WRITE = Group("Training options"), Group("Output options")
Side = Literal["post", "pre"]
Codec = Literal["keep", "bf16", "fp16", "int8", "nf4"]  # how a draft is stored


@dataclass(frozen=True, kw_only=True)
class HealConfig(Settings):
    """How the draft of `model` is trained, measured and written. With `epochs=0`, options that only training reads are refused.

    `also` lists further copies, each with its codec: (codec, folder).
    """

    model: Annotated[
        ModelConfig,
        Part(
            without=("pooling", "layer", "backbone", "load_in_4bit", "gpu_memory_gb"),
            help={"model": Help("The checkpoint: the trunk, and the draft to be healed.", "M")},
        ),
    ]
    chain: Annotated[Count, Help("Chain steps that are trained and counted."), TRAIN] = 3
    stride: Annotated[
        Natural, Help("0: every row is a chain. N >= chain: rounds as a server runs them, one every N rows."), TRAIN
    ] = 0
    refresh: (
        Annotated[Count, Help("Steps between two computations of what later chain steps are fed.", default="150"), TRAIN] | None
    ) = None
    epochs: Annotated[
        float, Range(least=0), Help("Passes over all jobs (a batch of windows at a chain step); 0 only measures."), TRAIN
    ] = 1.0
    lr: Annotated[Positive, Help("The largest learning rate.", default="2e-05"), TRAIN] | None = None
    batch: Annotated[Count, Help("Windows per step."), TRAIN] = 2
    eval_every: Annotated[Count, Help("Steps between two measurements.", default="25"), TRAIN] | None = None
    patience: Annotated[Count, Help("Measurements without a better one that end the training.", default="6"), TRAIN] | None = (
        None
    )
    hard: Annotated[Share, Help("Share of the mass moved to the trunk's first choice.", default="0"), TRAIN] | None = None
    last_hidden_norm: (
        Annotated[
            Side,
            Help("Trunk states that the draft is fed. Default: the checkpoint's, or its family's."),
            Old("--hidden"),
            TRAIN,
        ]
        | None
    ) = None
    recycle: (
        Annotated[
            Side, Help("Own states that the draft is fed at later steps. Default: the checkpoint's, or its family's."), TRAIN
        ]
        | None
    ) = None
    train_projection: Annotated[bool, Help("Train eh_proj as well."), Old("--train-proj"), TRAIN] = False
    init: Annotated[bool, Help("Begin with the trunk's last block (a model without a draft)."), TRAIN] = False
    draft_from: Annotated[Place, Help("Begin with the draft of this checkpoint.", "M"), TRAIN] | None = None
    codec: Annotated[Codec, Help("How the draft is stored; keep: as the source has it."), WRITE] = "keep"
    also: Annotated[
        tuple[tuple[Codec, Place], ...],
        Help("Another copy, with this codec; repeat it.", "CODEC=DIR", example="nf4=healed_nf4"),
        WRITE,
    ] = ()
    in_order: Annotated[bool, Help("Also count rounds one after another."), TRAIN] = False

    def check(self) -> None:
        if self.stride and self.stride < self.chain:
            raise InputError(f"--stride {self.stride} is shorter than --chain {self.chain}: give at least {self.chain}, or 0.")
        if not self.epochs:
            refuse_unread("--epochs 0", self, [*TRAINING, "train_projection"])
        require_one(self, ("init", "draft_from"), needed=False)

    @property
    def training(self) -> TrainingRules:
        """How it is trained, defaults in place."""
        return TrainingRules(**given(self, TRAINING))

    def recipe(self) -> dict[str, Any]:
        """What decides the trained weights, beside the trunk bank, the model and the first draft."""
        decisive = ("chain", "stride", "epochs", "batch", "train_projection", "init")
        return {"method": METHOD, **{name: getattr(self, name) for name in decisive}, **asdict(self.training)}
