"""What decides how a draft is healed, checked without reading anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from arrowbank.errors import InputError
from arrowbank.models import ModelConfig
from arrowbank.mtp.codecs import check_codec

SIDES = (None, "post", "pre")
METHOD = 1  # raise it when the same data and options would train to other weights


@dataclass(frozen=True, kw_only=True)
class HealConfig:
    """How the draft of `model` is trained, measured and written.

    chain        steps that are trained and counted
    stride       0: every row is a chain; n ≥ chain: rounds as a server runs them, one every n rows
    refresh      steps between two computations of what later chain steps are fed
    epochs       passes over all jobs (a batch of windows at a chain step); 0 only measures
    lr, batch    the largest learning rate; windows a step
    eval_every, patience   steps between two measurements; how many without a better one end the training
    hard         share of the teacher's mass that is moved to its first choice
    hidden, recycle   which side of the norms the draft is fed; None: the checkpoint's, or its family's
    train_projection  train eh_proj as well
    init         begin with the trunk's last block; draft_from: with the draft of another checkpoint
    codec, also  how the draft is stored in `out`, and in further copies: (codec, folder) each
    in_order     also count rounds one after another
    """

    model: ModelConfig
    chain: int = 3
    stride: int = 0
    refresh: int = 150
    epochs: float = 1.0
    lr: float = 2e-5
    batch: int = 2
    eval_every: int = 25
    patience: int = 6
    hard: float = 0.0
    hidden: str | None = None
    recycle: str | None = None
    train_projection: bool = False
    init: bool = False
    draft_from: str | None = None
    codec: str = "keep"
    also: tuple[tuple[str, str], ...] = ()
    in_order: bool = False

    def __post_init__(self) -> None:
        for name in ("chain", "refresh", "batch", "eval_every", "patience"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, it must be at least 1.")
        if self.stride and self.stride < self.chain:
            raise InputError(f"--stride {self.stride} is shorter than --chain {self.chain}: give at least {self.chain}, or 0.")
        if self.epochs < 0 or not self.lr > 0 or not 0 <= self.hard <= 1:
            raise InputError(
                f"--epochs {self.epochs}, --lr {self.lr}, --hard {self.hard}: expected 0 or more, more than 0, and 0 to 1."
            )
        for name in ("hidden", "recycle"):
            if getattr(self, name) not in SIDES:
                raise InputError(f"--{name} {getattr(self, name)}: expected post or pre.")
        if self.init and self.draft_from:
            raise InputError("--init and --draft-from both say where the draft begins: give one of them.")
        for codec in (self.codec, *(codec for codec, _ in self.also)):
            check_codec(codec)

    def recipe(self) -> dict[str, Any]:
        """What decides the trained weights, beside the trunk bank, the model and the first draft."""
        decisive = (
            "chain",
            "stride",
            "refresh",
            "epochs",
            "lr",
            "batch",
            "eval_every",
            "patience",
            "hard",
            "train_projection",
            "init",
        )
        return {"method": METHOD, **{name: getattr(self, name) for name in decisive}}
