"""The proof that hidden states are what their labels say: the model computes a few samples again, and nearness decides.

A tap must be nearest to the block that it is labelled with: a dump that is a layer off is nearest to the next one. The last hidden
states must be nearest to what comes out of the model before, or after, its final norm. Beside that, head on last hidden states
must give the tokens that the model itself gives next, and how often it does is said for both conventions.

Engines differ from transformers in last bits, and experts may be routed otherwise for a token: so the median over tokens counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from arrowbank.bank.checks import NOTHING, Check, attempt, found_wrong, run_check
from arrowbank.bank.floats import Bits, float32_of
from arrowbank.bank.kinds.targets_bank import EMBEDDINGS, TargetBank, TargetRows, TargetSample, target_checks
from arrowbank.bank.open import open_bank
from arrowbank.bank.verify import verify as verify_bank
from arrowbank.errors import InputError, NothingChecked
from arrowbank.formats import deepspec
from arrowbank.formats.export_checks import verify_bytes
from arrowbank.models import ModelConfig, describe
from arrowbank.models.device import resolve_device
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import Natural, checked, refuse_unread

if TYPE_CHECKING:
    from arrowbank.models import ModelInfo


SAMPLES = 4
MAX_TOKENS = 256
FITS = 0.2  # relative error: what engines differ by stays far below, and the next layer is rarely that near


@checked
def verify_targets(
    folder: str | Path,
    model: ModelConfig | None = None,
    *,
    samples: Natural | None = None,
    progress: Progress = SILENT,
) -> list[Check]:
    """All checks of a target bank, or of a DeepSpec cache, in `folder`; with `model`, also the proof by the model itself, which
    computes `samples` samples again (None: 4).

    Raises InputError where the model cannot be loaded or is not one that has been tapped, and for `samples` without a model;
    NothingChecked for 0 samples.
    """
    if model is None:
        refuse_unread("no --model", samples=samples)
    if samples == 0:
        raise NothingChecked("--samples 0: the model would compute nothing, and prove nothing. Give 1 or more.")
    if (Path(folder) / deepspec.INDEX).is_file():
        index = Path(folder) / deepspec.INDEX
        with attempt(index) as failures:
            rows: TargetRows = deepspec.DeepSpecCache(folder)
        if failures:
            return [Check("opens", False, failures[0])]
        opened = Check("opens", True, f"a DeepSpec cache of {len(rows.lengths):,} samples; index and sizes fit")
        if not len(rows.lengths):
            return [opened, Check("rows", False, NOTHING)]
        checks = [opened, *verify_bytes(Path(folder), progress=progress)]
        checks += run_check("rows", index, lambda: target_checks(rows, progress=progress))
    else:
        checks = verify_bank(folder, progress=progress)
        if not checks[0].ok or any(check.name == "rows" and not check.ok for check in checks):
            return checks
        rows = open_bank(folder, kind=TargetBank)
    if model is None:
        return checks
    return checks + prove(rows, model, samples=samples or SAMPLES, progress=progress)


def prove(rows: TargetRows, config: ModelConfig, *, samples: int = SAMPLES, progress: Progress = SILENT) -> list[Check]:
    """Compute `samples` samples, spread over the rows, again with the model, and hold labels and states against it."""
    witness = Witness(config)
    _require_same_shape(rows, witness.info)
    nearness = _Nearness(rows)
    chosen = np.unique(np.linspace(0, len(rows.lengths) - 1, samples).astype(np.int64))
    with attempt(Path(rows.place)) as failures, progress.phase("prove", len(chosen), unit="samples") as phase:
        for row in chosen:
            sample = rows.read(int(row))
            nearness.compare(sample, witness.compute(sample.input_ids[:MAX_TOKENS]), witness)
            phase.advance(1)
    if failures:
        return [Check("layers", False, failures[0])]
    if not nearness.tokens:
        detail = f"no hidden state is kept within the first {MAX_TOKENS} tokens of {len(chosen)} samples: give more --samples"
        return [Check("proof", False, detail)]
    place, layers = Path(rows.place), witness.info.num_layers
    return run_check("layers", place, lambda: nearness.layers(layers)) + run_check("norm", place, nearness.norm)


def _require_same_shape(rows: TargetRows, info: ModelInfo) -> None:
    facts = rows.facts
    last = max(facts.target_layer_ids or (0,))
    if facts.hidden_size != info.hidden_size or last >= info.num_layers:
        raise InputError(
            f"{rows.place}: hidden states of width {facts.hidden_size}, up to layer {last}; {info.model} has width "
            f"{info.hidden_size} and layers 0 to {info.num_layers - 1}. Give the model that these are of."
        )


@dataclass(frozen=True)
class Computed:
    """What the model gives for one sample: blocks [n + 1, T, H] float32 (the embeddings first), after the norm [T, H], and its
    own next tokens [T]."""

    blocks: torch.Tensor
    post: torch.Tensor
    next_tokens: torch.Tensor


class Witness:
    """The target model with its head, tapped at every block. Raises InputError for a model that cannot be."""

    def __init__(self, config: ModelConfig) -> None:
        from arrowbank.models.load import load_reader
        from arrowbank.models.taps import TapReader

        config = replace(config, backbone="outer", layer=-1)
        self.info = describe(config)
        self.device = torch.device(resolve_device(config)[0])
        model: Any = load_reader(config, self.info, self.device, lambda model: model)
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise InputError(f"{config.model}: has no LM head. Give a causal language model.")
        layers = range(EMBEDDINGS, self.info.num_layers)
        self._taps = TapReader(model.get_decoder(), self.info, self.device, layers, "post")

    def compute(self, input_ids: np.ndarray[Any, np.dtype[np.int32]]) -> Computed:
        """A pass over [T] tokens."""
        if len(input_ids) and int(input_ids.max()) >= self.info.vocab_size:
            raise InputError(
                f"token id {input_ids.max()}, but {self.info.model} has a vocabulary of {self.info.vocab_size}. Give the model "
                "that these hidden states are of."
            )
        with torch.inference_mode():
            ids = torch.from_numpy(input_ids.astype(np.int64))[None].to(self.device)
            states = self._taps(ids)[0]
            next_tokens = self.head(states[:, -1]).argmax(dim=-1).cpu()
        states = states.float().cpu()
        return Computed(states[:, :-1].transpose(0, 1), states[:, -1], next_tokens)

    def next_tokens(self, hidden: torch.Tensor, *, normed: bool) -> torch.Tensor:
        """What the head makes of hidden states [T, H], after the final norm or, where they are before it, through it."""
        with torch.inference_mode():
            states = hidden.to(self.device, getattr(torch, self.info.dtype))
            if not normed and self._taps.final_norm is not None:
                states = self._taps.final_norm(states)
            tokens: torch.Tensor = self.head(states).argmax(dim=-1).cpu()
        return tokens


class _Nearness:
    """How far stored hidden states are from computed ones: relative errors a token, collected over samples."""

    def __init__(self, rows: TargetRows) -> None:
        self._facts = rows.facts
        self.tokens = 0  # compared so far
        self._to_blocks: list[list[torch.Tensor]] = [[] for _ in range(rows.facts.layers)]  # a tap: [n + 1, T] a sample
        self._to_norms: dict[str, list[torch.Tensor]] = {"post": [], "pre": []}
        self._agreements: dict[str, list[torch.Tensor]] = {"post": [], "pre": []}

    def compare(self, sample: TargetSample, computed: Computed, witness: Witness) -> None:
        length = computed.post.shape[0]
        places = np.arange(len(sample.input_ids)) if sample.positions is None else sample.positions
        kept = np.flatnonzero(places < length)
        at = torch.from_numpy(places[kept].astype(np.int64))
        if not len(kept):
            return
        self.tokens += len(kept)
        taps = _values(sample.taps[kept]).view(len(kept), self._facts.layers, -1)
        last = _values(sample.last[kept])
        blocks = computed.blocks[:, at]
        for tap in range(self._facts.layers):
            self._to_blocks[tap].append(_relative(taps[:, tap], blocks))
        for norm, true in (("post", computed.post[at]), ("pre", blocks[-1])):
            self._to_norms[norm].append(_relative(last, true))
            tokens = witness.next_tokens(last, normed=norm == "post")
            self._agreements[norm].append((tokens == computed.next_tokens[at]).float())

    def layers(self, num_layers: int) -> Check:
        """Whether each tap is nearest to the block that it is labelled with."""
        ids = self._facts.target_layer_ids
        wrong, found, errors = [], [], []
        for tap in range(self._facts.layers):
            medians = torch.cat(self._to_blocks[tap], dim=1).median(dim=1).values
            nearest = int(medians.argmin()) + EMBEDDINGS
            error = float(medians.min())
            found.append(nearest)
            errors.append(error)
            label = ids[tap] if ids else None
            if not error <= FITS:  # NaN is no nearness
                wrong.append(f"tap {tap} is like no layer (nearest is {nearest}, {error:.0%} off)")
            elif label is not None and label != nearest:
                wrong.append(f"tap {tap} is labelled layer {label} and is layer {nearest} ({error:.1%} off)")
        shifts = {there - label for there, label in zip(found, ids or (), strict=False)}
        if wrong and len(shifts) == 1 and shifts != {0}:
            wrong.insert(0, f"all taps are {shifts.pop():+d} layers from their labels")
        if ids is None:
            return Check("layers", False, f"nobody said which layers these are; they are {', '.join(map(str, found))}")
        good = f"taps are layers {', '.join(map(str, found))} of {num_layers}, within {max(errors):.2%}"
        return found_wrong("layers", wrong, good, "")

    def norm(self) -> Check:
        """Whether the last hidden states are after or before the final norm, as labelled."""
        medians = {norm: float(torch.cat(parts).median()) for norm, parts in self._to_norms.items()}
        agreement = {norm: float(torch.cat(parts).mean()) for norm, parts in self._agreements.items()}
        nearest = min(medians, key=lambda norm: medians[norm])
        label = self._facts.last_hidden_norm
        told = ", ".join(f"{norm}: {medians[norm]:.2%} off, {agreement[norm]:.1%} of next tokens agree" for norm in medians)
        if not medians[nearest] <= FITS:
            return Check("norm", False, f"labelled {label}, like neither convention ({told}): of another model, or damaged")
        if label == "unknown":
            return Check(
                "norm", True, f"nobody said which; they are {nearest} ({told}): export with --last-hidden-norm {nearest}"
            )
        return Check("norm", label == nearest, f"labelled {label}, they are {nearest} ({told})")


def _values(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(float32_of(np.ascontiguousarray(bits)))


def _relative(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """‖found − true‖ / ‖true‖ over the last dimension."""
    error: torch.Tensor = (found - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-30)
    return error
