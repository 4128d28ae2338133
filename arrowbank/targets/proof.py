"""The proof that hidden states are what their labels say: the model computes a few samples again, and nearness decides.

A tap must be nearest to the block that it is labelled with: a dump that is a layer off is nearest to the next one. The last hidden
states must be nearest to what comes out of the model before, or after, its final norm. Beside that, head on last hidden states
must give the tokens that the model itself gives next, and how often it does is said for both conventions.

Engines differ from transformers in last bits, and experts may be routed otherwise for a token: so the median over tokens counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.floats import Bits, float32_of
from arrowbank.bank.target_checks import target_checks
from arrowbank.bank.targets import EMBEDDINGS, TargetRows, TargetSample, open_target_bank
from arrowbank.bank.verify import verify as verify_bank
from arrowbank.errors import ArrowbankError, InputError
from arrowbank.formats import deepspec
from arrowbank.models import ModelConfig, describe
from arrowbank.progress import SILENT, Progress

if TYPE_CHECKING:
    from arrowbank.models import ModelInfo

SAMPLES = 4
MAX_TOKENS = 256
FITS = 0.2  # relative error: what engines differ by stays far below, and the next layer is rarely that near


def verify_targets(
    folder: str | Path,
    model: ModelConfig | None = None,
    *,
    samples: int = SAMPLES,
    progress: Progress = SILENT,
) -> list[Check]:
    """All checks of a target bank, or of a DeepSpec cache, in `folder`; with `model`, also the proof by the model itself.

    Raises InputError where the model cannot be loaded or is not one that has been tapped.
    """
    if (Path(folder) / deepspec.INDEX).is_file():
        try:
            rows: TargetRows = deepspec.DeepSpecCache(folder)
        except ArrowbankError as error:
            return [Check("opens", False, str(error))]
        opened = Check("opens", True, f"a DeepSpec cache of {len(rows.lengths):,} samples; index and sizes fit")
        checks = [opened, *target_checks(rows, progress=progress)]
    else:
        checks = verify_bank(folder, progress=progress)
        if not checks[0].ok:
            return checks
        rows = open_target_bank(folder)
    if model is None:
        return checks
    return checks + prove(rows, model, samples=samples, progress=progress)


def prove(rows: TargetRows, config: ModelConfig, *, samples: int = SAMPLES, progress: Progress = SILENT) -> list[Check]:
    """Compute `samples` samples, spread over the rows, again with the model, and hold labels and states against it."""
    witness = Witness(config)
    _require_same_shape(rows, witness.info)
    nearness = _Nearness(rows)
    chosen = np.unique(np.linspace(0, len(rows.lengths) - 1, samples).astype(np.int64))
    with progress.phase("prove", len(chosen), unit="samples") as phase:
        for row in chosen:
            sample = rows.read(int(row))
            nearness.compare(sample, witness.compute(sample.input_ids[:MAX_TOKENS]), witness)
            phase.advance(1)
    return [nearness.layers(witness.info.num_layers), nearness.norm()]


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
    """The target model with its head, and hooks that keep what its blocks put out."""

    def __init__(self, config: ModelConfig) -> None:
        from arrowbank.models.device import resolve_device
        from arrowbank.models.layers import find_blocks
        from arrowbank.models.loading import load_hidden_states

        config = replace(config, backbone="outer", layer=-1)
        self.info = describe(config)
        self.device = torch.device(resolve_device(config)[0])
        reader: Any = load_hidden_states(config, self.info, self.device)
        self.model = reader.model
        blocks = find_blocks(self.model.get_decoder(), self.info.num_layers)
        self.head = self.model.get_output_embeddings()
        if blocks is None or self.head is None:
            raise InputError(f"{config.model}: no decoder blocks and LM head were found in it. Give a causal language model.")
        self._kept: list[torch.Tensor] = []
        self._norm: nn.Module | None = None
        blocks[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
        for block in blocks:
            block.register_forward_hook(self._keep_output)
        self._find_norm()

    def _keep_input(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kept.append(args[0] if args else kwargs["hidden_states"])

    def _keep_output(self, block: nn.Module, args: Any, output: Any) -> None:
        self._kept.append(output[0] if isinstance(output, tuple) else output)

    def _find_norm(self) -> None:
        """The final norm is the module that is given what the last block puts out."""
        found: list[nn.Module] = []

        def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and self._kept and args[0] is self._kept[-1] and torch.is_tensor(output):
                found.append(module)

        norms = [module for module in self.model.get_decoder().children() if not isinstance(module, nn.ModuleList)]
        hooks = [module.register_forward_hook(look) for module in norms]
        self.compute(np.arange(min(3, self.info.vocab_size), dtype=np.int32))
        for hook in hooks:
            hook.remove()
        self._norm = found[-1] if found else None

    def compute(self, input_ids: np.ndarray[Any, np.dtype[np.int32]]) -> Computed:
        """A pass over [T] tokens."""
        if len(input_ids) and int(input_ids.max()) >= self.info.vocab_size:
            raise InputError(
                f"token id {input_ids.max()}, but {self.info.model} has a vocabulary of {self.info.vocab_size}. Give the model "
                "that these hidden states are of."
            )
        self._kept.clear()
        with torch.inference_mode():
            ids = torch.from_numpy(input_ids.astype(np.int64))[None].to(self.device)
            out = self.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        blocks = torch.stack([kept[0].float().cpu() for kept in self._kept])
        return Computed(blocks, out.hidden_states[-1][0].float().cpu(), out.logits[0].argmax(dim=-1).cpu())

    def next_tokens(self, hidden: torch.Tensor, *, normed: bool) -> torch.Tensor | None:
        """What the head makes of hidden states [T, H], after the final norm or, where they are before it, through it."""
        with torch.inference_mode():
            dtype = getattr(torch, self.info.dtype)
            states = hidden.to(self.device, dtype)
            if not normed:
                if self._norm is None:
                    return None
                states = self._norm(states)
            tokens: torch.Tensor = self.head(states).argmax(dim=-1).cpu()
        return tokens


class _Nearness:
    """How far stored hidden states are from computed ones: relative errors a token, collected over samples."""

    def __init__(self, rows: TargetRows) -> None:
        self._facts = rows.facts
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
        taps = _values(sample.taps[kept]).view(len(kept), self._facts.layers, -1)
        last = _values(sample.last[kept])
        blocks = computed.blocks[:, at]
        for tap in range(self._facts.layers):
            self._to_blocks[tap].append(_relative(taps[:, tap], blocks))
        for norm, true in (("post", computed.post[at]), ("pre", blocks[-1])):
            self._to_norms[norm].append(_relative(last, true))
            tokens = witness.next_tokens(last, normed=norm == "post")
            if tokens is not None:
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
            if error > FITS:
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
        agreement = {norm: float(torch.cat(parts).mean()) for norm, parts in self._agreements.items() if parts}
        nearest = min(medians, key=lambda norm: medians[norm])
        label = self._facts.last_hidden_norm
        told = ", ".join(
            f"{norm}: {medians[norm]:.2%} off" + (f", {agreement[norm]:.1%} of next tokens agree" if norm in agreement else "")
            for norm in medians
        )
        if medians[nearest] > FITS:
            return Check("norm", False, f"labelled {label}, like neither convention ({told}): of another model, or damaged")
        if label == "unknown":
            return Check("norm", True, f"nobody said which; they are {nearest} ({told}): export with --assume-norm {nearest}")
        return Check("norm", label == nearest, f"labelled {label}, they are {nearest} ({told})")


def _values(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(float32_of(np.ascontiguousarray(bits)))


def _relative(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """‖found − true‖ / ‖true‖ over the last dimension."""
    error: torch.Tensor = (found - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-30)
    return error
