"""The proof that hidden states are what their labels say: the model computes samples again, and nearness decides.

Of each sample that is looked at, every tap and the last hidden states are held against the model over all tokens, a stretch of WINDOW
tokens at a time: so a defect in a part of a sample, in one tap or in one sample is found. A stretch is judged by what three quarters of its
tokens stay below, since experts may be routed otherwise for a token. How near is near enough, the model itself says: it computes some
samples once more with another attention kernel, in another batch shape and, where it runs in float32, in bfloat16, and engines may
differ by some times what that changes. What is wrong is then named: zeros, a scale, a displacement, another layer, another request, noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
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


CONFIDENCE, SHARE = 0.95, 0.05  # the default finds a defect in this share of the samples with this probability
SAMPLES = math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - SHARE))
WINDOW = 16  # tokens of a stretch
CALIBRATED = 4  # samples that are computed in other ways
TOLERATED = 4.0  # times what the model itself differs by
FITS = 0.2  # relative error: nothing farther away is near, whatever the model differs by
STORED = {"bf16": 0.004, "fp8": 0.05}  # what the codec may add
FARTHEST = 64  # tokens that states are looked for displaced by
REMEMBERED = 64  # tokens of other samples that are kept to find their states again
SHOWN_FAULTS = 6


@checked
def verify_targets(
    folder: str | Path,
    model: ModelConfig | None = None,
    *,
    samples: Natural | str | None = None,
    progress: Progress = SILENT,
) -> list[Check]:
    """All checks of a target bank, or of a DeepSpec cache, in `folder`; with `model`, also the proof by the model itself, which
    computes `samples` samples again ("all", or None: as many as find a defect in 5 % of the samples with probability 0.95).

    Raises InputError where the model cannot be loaded or is not one that has been tapped, and for `samples` without a model;
    NothingChecked for 0 samples.
    """
    if model is None:
        refuse_unread("no --model", samples=samples)
    if isinstance(samples, str) and samples != "all":
        raise InputError(f"--samples {samples}: expected a number, or all.")
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


def prove(rows: TargetRows, config: ModelConfig, *, samples: int | str = SAMPLES, progress: Progress = SILENT) -> list[Check]:
    """Compute `samples` samples, spread over shards and lengths, again with the model, and hold labels and states against it."""
    witness = Witness(config)
    _require_same_shape(rows, witness.info)
    chosen = choose(rows, samples)
    proof = _Proof(rows, witness)
    with attempt(Path(rows.place)) as failures, progress.phase("prove", len(chosen), unit="samples") as phase:
        for row in chosen[:: max(1, len(chosen) // CALIBRATED)][:CALIBRATED]:
            proof.calibrate(rows.read(int(row)).input_ids)
        for row in chosen:
            proof.look(int(row), rows.read(int(row)))
            phase.advance(1)
    if failures:
        return [Check("layers", False, failures[0])]
    if not proof.tokens:
        detail = f"no hidden state is kept in {len(chosen)} samples: give more --samples"
        return [Check("proof", False, detail)]
    place = Path(rows.place)
    named = {"layers": proof.layers, "norm": proof.norm, "states": proof.states, "answers": proof.answers}
    checks = [one for name, check in named.items() for one in run_check(name, place, check)]
    return [*checks, Check("reach", True, reach(len(chosen), len(rows.lengths), proof.tokens))]


def choose(rows: TargetRows, samples: int | str) -> npt.NDArray[np.int64]:
    """The rows that are looked at, ascending: one of each stratum of places, so that every shard has its share, one of each stratum of
    lengths, the shortest and the longest; drawn from the bank's digest, so the same every time.
    """
    count = len(rows.lengths)
    if samples == "all" or int(samples) >= count:
        return np.arange(count)
    draw = np.random.default_rng(list(str(rows.digest).encode()))
    by_length = np.lexsort((np.arange(count), np.asarray(rows.lengths)))
    ends = [int(by_length[0]), int(by_length[-1])] if int(samples) > 2 else []
    places = int(samples) - len(ends) - (int(samples) - len(ends)) // 2
    found = set(ends)
    for order, strata in ((np.arange(count), places), (by_length, int(samples) - len(ends) - places)):
        for part in np.array_split(order, strata) if strata else ():
            left = [int(row) for row in part if int(row) not in found] or [row for row in range(count) if row not in found]
            found.add(left[int(draw.integers(len(left)))])
    return np.array(sorted(found), np.int64)


def reach(looked: int, count: int, tokens: int) -> str:
    """What a proof of `looked` of `count` samples can find."""
    if looked >= count:
        return f"all {count:,} samples and {tokens:,} tokens were looked at"
    share = 1 - (1 - CONFIDENCE) ** (1 / looked)
    return (
        f"{looked:,} of {count:,} samples and {tokens:,} tokens were looked at: a defect in {share:.1%} of the samples is found with "
        f"probability {CONFIDENCE:.2f} (--samples all looks at every one)"
    )


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
        self._config = model.config
        self._taps = TapReader(model.get_decoder(), self.info, self.device, layers, "post")

    def compute(self, input_ids: npt.NDArray[np.int32], *, rows: int = 1) -> Computed:
        """A pass over [T] tokens, in a batch of `rows` that are equal."""
        if len(input_ids) and int(input_ids.max()) >= self.info.vocab_size:
            raise InputError(
                f"token id {input_ids.max()}, but {self.info.model} has a vocabulary of {self.info.vocab_size}. Give the model "
                "that these hidden states are of."
            )
        with torch.inference_mode():
            ids = torch.from_numpy(input_ids.astype(np.int64)).expand(rows, -1).to(self.device)
            states = self._taps(ids)[0]
            next_tokens = self.head(states[:, -1]).argmax(dim=-1).cpu()
        states = states.float().cpu()
        return Computed(states[:, :-1].transpose(0, 1), states[:, -1], next_tokens)

    def compute_otherwise(self, input_ids: npt.NDArray[np.int32]) -> Iterator[Computed]:
        """The same pass in ways that an engine may choose: in another batch shape, with another attention kernel, in bfloat16."""
        yield self.compute(input_ids, rows=2)
        with self._attention("eager"):
            yield self.compute(input_ids)
        if self.info.dtype == "float32":
            with torch.autocast(self.device.type, torch.bfloat16):
                yield self.compute(input_ids)

    @contextmanager
    def _attention(self, kind: str) -> Iterator[None]:
        before = self._config._attn_implementation
        self._config._attn_implementation = kind
        try:
            yield
        finally:
            self._config._attn_implementation = before

    def next_tokens(self, hidden: torch.Tensor, *, normed: bool) -> torch.Tensor:
        """What the head makes of hidden states [T, H], after the final norm or, where they are before it, through it."""
        with torch.inference_mode():
            states = hidden.to(self.device, getattr(torch, self.info.dtype))
            if not normed and self._taps.final_norm is not None:
                states = self._taps.final_norm(states)
            tokens: torch.Tensor = self.head(states).argmax(dim=-1).cpu()
        return tokens


@dataclass
class _Fault:
    """What is wrong with the states of one sample under one name."""

    row: int
    name: str  # "tap 1 (layer 17)" or "last hidden states"
    first: int
    last: int
    of: int
    said: str

    def __str__(self) -> str:
        where = "all tokens" if self.last - self.first + 1 >= self.of else f"tokens {self.first}–{self.last} of {self.of}"
        return f"sample {self.row}, {self.name}, {where}: {self.said}"


@dataclass
class _Line:
    """One tap, or the last hidden states, over all samples: relative errors to everything that it may be."""

    name: str
    label: int | None  # among the candidates
    noise: list[float] = field(default_factory=list)  # of stretches, from the model computed otherwise
    errors: list[torch.Tensor] = field(default_factory=list)  # of tokens: [candidates, T] a sample

    def medians(self) -> torch.Tensor:
        """How far the median token of all samples is from each candidate."""
        return torch.cat(self.errors, dim=1).median(dim=1).values

    def tolerance(self, stored: float) -> float:
        own = float(np.quantile(self.noise, 0.95)) if self.noise else 0.0
        return min(FITS, stored + TOLERATED * own)


class _Proof:
    """Stored states against computed ones, collected over samples."""

    def __init__(self, rows: TargetRows, witness: Witness) -> None:
        self._rows, self._facts, self._witness = rows, rows.facts, witness
        ids = rows.facts.target_layer_ids
        self._taps = [
            _Line(f"tap {tap}" + (f" (layer {ids[tap]})" if ids else ""), ids[tap] - EMBEDDINGS if ids else None)
            for tap in range(rows.facts.layers)
        ]
        sides = {"post": 0, "pre": 1}
        self._last = _Line("last hidden states", sides.get(rows.facts.last_hidden_norm))
        self._stored = STORED.get(rows.facts.codec, STORED["fp8"])
        self._seen: dict[int, Computed] = {}
        self._agree = {"post": [0, 0], "pre": [0, 0]}
        self._own_agree = [0, 0]
        self._faults: list[_Fault] = []
        self.tokens = 0

    # the model against itself

    def calibrate(self, input_ids: npt.NDArray[np.int32]) -> None:
        """Measure what the model's states differ by when they are computed otherwise."""
        true = self._witness.compute(input_ids)
        for other in self._witness.compute_otherwise(input_ids):
            for line in self._taps:
                for block in [line.label] if line.label is not None else range(len(true.blocks)):
                    line.noise += _stretches(_relative(other.blocks[block], true.blocks[block])).tolist()
            for found, wanted in ((other.post, true.post), (other.blocks[-1], true.blocks[-1])):
                self._last.noise += _stretches(_relative(found, wanted)).tolist()
            self._own_agree[0] += int((other.next_tokens == true.next_tokens).sum())
            self._own_agree[1] += len(true.next_tokens)

    # the stored states

    def look(self, row: int, sample: TargetSample) -> None:
        """Hold one sample against the model."""
        places = np.arange(len(sample.input_ids)) if sample.positions is None else sample.positions.astype(np.int64)
        if not len(places):
            return
        true = self._witness.compute(sample.input_ids)
        at = torch.from_numpy(np.ascontiguousarray(places, np.int64))
        self.tokens += len(places)
        taps = _values(sample.taps).view(len(places), self._facts.layers, -1)
        last = _values(sample.last)
        for tap, line in enumerate(self._taps):
            line.errors.append(_relative(taps[:, tap], true.blocks[:, at]))
        sides = torch.stack([true.post, true.blocks[-1]])
        self._last.errors.append(_relative(last, sides[:, at]))
        for norm in self._agree:
            tokens = self._witness.next_tokens(last, normed=norm == "post")
            self._agree[norm][0] += int((tokens == true.next_tokens[at]).sum())
            self._agree[norm][1] += len(tokens)
        for tap, line in enumerate(self._taps):
            self._judge(row, line, taps[:, tap], true.blocks, places)
        self._judge(row, self._last, last, sides, places)
        self._seen[row] = Computed(true.blocks[:, :REMEMBERED].clone(), true.post[:REMEMBERED].clone(), true.next_tokens[:0])

    def _judge(
        self, row: int, line: _Line, found: torch.Tensor, candidates: torch.Tensor, places: npt.NDArray[np.int64]
    ) -> None:
        """Find the stretches of one sample that are not what they are labelled."""
        if line.label is None:
            return
        tolerance, errors = line.tolerance(self._stored), line.errors[-1]
        others = _stretches(errors)
        mine = others[line.label].clone()
        others[line.label] = torch.inf
        bad = ~(mine <= tolerance) | ((others.min(dim=0).values < mine / 2) & (mine > self._stored))
        if not bad.any():
            return
        starts = _starts(len(places))
        rows = np.unique(np.concatenate([np.arange(start, min(start + WINDOW, len(places))) for start in starts[bad.numpy()]]))
        if not bad.all():  # of the tokens of those stretches, those that are far away themselves
            far = rows[(~(errors[line.label] <= tolerance)).numpy()[rows]]
            rows = far if len(far) else rows
        said = self._diagnosis(row, line, found, candidates, places, rows, tolerance)
        self._faults.append(_Fault(row, line.name, int(places[rows[0]]), int(places[rows[-1]]), int(candidates.shape[1]), said))

    def _diagnosis(
        self,
        row: int,
        line: _Line,
        found: torch.Tensor,
        candidates: torch.Tensor,
        places: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        tolerance: float,
    ) -> str:
        """What the states at `rows` are instead."""
        label = int(line.label or 0)
        states, true = found[torch.from_numpy(rows)], candidates[label]
        at = places[rows]
        wanted = true[torch.from_numpy(at)]
        if not states.isfinite().all():
            return "not finite"
        if not states.any():
            return "all zero"
        for other in range(len(candidates)):
            if other != label and _near(states, candidates[other][torch.from_numpy(at)], tolerance):
                if line is self._last:
                    return f"are {('post', 'pre')[other]}, labelled {('post', 'pre')[label]}"
                return f"are those of layer {other + EMBEDDINGS}"
        for step in (sign * size for size in range(1, FARTHEST + 1) for sign in (1, -1)):
            inside = (at + step >= 0) & (at + step < len(true))
            if inside.sum() >= max(2, len(at) // 2) and _near(
                states[inside], true[torch.from_numpy(at[inside] + step)], tolerance
            ):
                return f"displaced: they are those of {abs(step)} tokens {'later' if step > 0 else 'earlier'}"
        scale = float((states * wanted).sum() / (wanted * wanted).sum().clamp_min(1e-30))
        if abs(scale - 1) > self._stored and _near(states, wanted * scale, max(self._stored, tolerance / 4)):
            return f"on another scale: × {scale:.3g}"
        if (other_row := self._owner(row, line, states, at, tolerance)) is not None:
            return f"are those of sample {other_row}"
        error = float(_relative(states, wanted).median())
        return f"like nothing that the model gives there ({error:.1%} off, allowed {tolerance:.1%}): noise, another request or model"

    def _owner(self, row: int, line: _Line, states: torch.Tensor, at: npt.NDArray[np.int64], tolerance: float) -> int | None:
        """The sample whose states these are, as computed or as the bank stores them."""
        early = at < REMEMBERED
        for other, computed in self._seen.items():
            sides = torch.stack([computed.post, computed.blocks[-1]]) if line is self._last else computed.blocks
            true = sides[int(line.label or 0)]
            inside = early & (at < len(true))
            if inside.sum() >= 2 and _near(states[inside], true[torch.from_numpy(at[inside])], tolerance):
                return other
        count = len(self._rows.lengths)
        for other in np.unique(np.linspace(0, count - 1, min(count, 4 * REMEMBERED)).astype(np.int64)).tolist():
            sample = self._rows.read(other)
            if other == row or sample.positions is not None:
                continue
            stored = _values(sample.last)
            if line is not self._last:
                tap = self._taps.index(line)
                stored = _values(sample.taps).view(len(stored), self._facts.layers, -1)[:, tap]
            inside = at < len(stored)
            if inside.sum() >= 2 and _near(states[inside], stored[torch.from_numpy(at[inside])], tolerance):
                return int(other)
        return None

    # what there is to say

    def layers(self) -> Check:
        """Whether each tap is nearest to the block that it is labelled with."""
        ids, wrong, found, errors = self._facts.target_layer_ids, [], [], []
        for tap, line in enumerate(self._taps):
            medians = line.medians()
            nearest, error = int(medians.argmin()) + EMBEDDINGS, float(medians.min())
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
        good = f"taps are layers {', '.join(map(str, found))} of {self._witness.info.num_layers}, within {max(errors):.2%}"
        return found_wrong("layers", wrong, good, "")

    def norm(self) -> Check:
        """Whether the last hidden states are after or before the final norm, as labelled."""
        medians, nearest = self._norms()
        agreement = {norm: equal / max(1, count) for norm, (equal, count) in self._agree.items()}
        label = self._facts.last_hidden_norm
        told = ", ".join(f"{norm}: {medians[norm]:.2%} off, {agreement[norm]:.1%} of next tokens agree" for norm in medians)
        if not medians[nearest] <= FITS:
            return Check("norm", False, f"labelled {label}, like neither convention ({told}): of another model, or damaged")
        if label == "unknown":
            return Check(
                "norm", True, f"nobody said which; they are {nearest} ({told}): export with --last-hidden-norm {nearest}"
            )
        return Check("norm", label == nearest, f"labelled {label}, they are {nearest} ({told})")

    def _norms(self) -> tuple[dict[str, float], str]:
        """How far the last hidden states are from either side of the norm, and the nearer side."""
        medians = dict(zip(("post", "pre"), self._last.medians().tolist(), strict=True))
        return medians, min(medians, key=lambda norm: medians[norm])

    def _mislabelled(self) -> set[str]:
        """The names of what is another thing as a whole: `layers` and `norm` say so."""
        found = set()
        for line in (*self._taps, self._last):
            medians = line.medians()
            if line.label not in (None, int(medians.argmin())) and float(medians.min()) <= FITS:
                found.add(line.name)
        return found

    def states(self) -> Check:
        """Whether every stretch of every sample is what it is labelled, or what all the others are."""
        allowed = max(line.tolerance(self._stored) for line in (*self._taps, self._last))
        good = f"every stretch of {WINDOW} tokens is near what the model gives (at most {allowed:.2%} off)"
        whole = self._mislabelled()
        faults = [fault for fault in self._faults if fault.name not in whole]
        if not faults:
            return Check("states", True, f"{good}, but for {', '.join(sorted(whole))}" if whole else good)
        samples = sorted({fault.row for fault in faults})
        shown = "; ".join(map(str, faults[:SHOWN_FAULTS]))
        more = len(faults) - SHOWN_FAULTS
        return Check("states", False, f"{len(samples)} samples are wrong: {shown}" + (f"; and {more} more" if more > 0 else ""))

    def answers(self) -> Check:
        """Whether the head says what the model says, as often as it does of the model's own states computed otherwise."""
        _, norm = self._norms()  # whether that is the label's, `norm` says
        (equal, count), (own_equal, own_count) = self._agree[norm], self._own_agree
        found, own = equal / max(1, count), own_equal / max(1, own_count)
        # of as many tokens, this much fewer is chance; a codec of 8 bits turns near ties
        least = own - 3 * math.sqrt(max(own * (1 - own), 0.01) / max(1, count)) - 2 * self._stored - 0.01
        said = f"{found:.1%} agree with the model's, {own:.1%} of its own when it computes otherwise"
        return Check("answers", found >= least, said if found >= least else f"{said}; expected at least {least:.1%}")


def _starts(count: int) -> npt.NDArray[np.int64]:
    """Where stretches begin: half a WINDOW apart, the last one ends with the sample."""
    if count <= WINDOW:
        return np.zeros(1, np.int64)
    return np.unique(np.append(np.arange(0, count - WINDOW + 1, WINDOW // 2), count - WINDOW))


def _stretches(errors: torch.Tensor) -> torch.Tensor:
    """The error that three quarters of each stretch stay below, of the errors [..., T] of tokens: [..., stretches]."""
    size = min(WINDOW, errors.shape[-1])
    places = torch.from_numpy(_starts(errors.shape[-1]))[:, None] + torch.arange(size)
    parts = torch.where(errors.isnan(), torch.inf, errors)[..., places]  # NaN is as far away as can be
    return parts.sort(dim=-1).values[..., 3 * (size - 1) // 4]


def _near(found: torch.Tensor, true: torch.Tensor, tolerance: float) -> bool:
    return bool(_relative(found, true).median() <= tolerance)


def _values(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(float32_of(np.ascontiguousarray(bits)))


def _relative(found: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """‖found − true‖ / ‖true‖ over the last dimension."""
    error: torch.Tensor = (found - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-30)
    return error
