"""What distance does: a small decoder trained on arm b (needles next to their probes) and on arm c (far from them), and its reach.

Both models begin with the same weights and see the same filler, keys, values and answer positions in the same order; only the distance
differs. Filler is the source text of Python's standard library, a token a byte. On two cores the whole takes some minutes.

    python recipes/in2_reach.py [--out in2_reach]

writes the arms, the models, the probes, and scores/ with scores.csv, scores.json and scores.svg.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arrowbank import (
    In2Config,
    ModelConfig,
    ProbesConfig,
    ScoreConfig,
    build_in2,
    build_probes,
    open_bank,
    score_probes,
    verify_in2,
)
from arrowbank.bank.columns import fixed_lists
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError, CorruptBank
from arrowbank.in2.arm_config import ArmName
from arrowbank.in2.score import score_lines

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The whole experiment."""

    arm: In2Config
    probes: ProbesConfig
    steps: int
    batch: int
    lr: float = 2e-3
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    filler_bytes: int = 4_000_000
    arms: tuple[ArmName, ...] = field(default=("b", "c"))


def in2_reach() -> Reach:
    """The experiment of the docs."""
    shape: dict[str, Any] = {"length": 256, "key_len": 2, "val_len": 4, "alphabet": 64, "vocab": BYTES}
    return Reach(
        arm=In2Config(arm="b", examples=16_000, triples=4, decoys=0, min_distance=16, mirror=False, **shape),
        probes=ProbesConfig(positions=(0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0), blocks=64, seed=1, **shape),
        steps=800,
        batch=32,
    )


def tiny() -> Reach:
    """The same in seconds: it learns next to nothing."""
    whole = in2_reach()
    arm, probes = replace(whole.arm, examples=40), replace(whole.probes, blocks=4)
    return replace(whole, arm=arm, probes=probes, steps=4, batch=4, hidden_size=32, filler_bytes=100_000)


def write_fillers(folder: Path, count: int) -> dict[str, Path]:
    """Bytes of the standard library's sources as token ids: for training, and others for the probes."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[:count]
    ids, cut = np.frombuffer(text, np.uint8).astype("<u2"), len(text) * 9 // 10
    paths = {"train": folder / "train_0.bin", "val": folder / "val_0.bin"}
    for path, part in zip(paths.values(), (ids[:cut], ids[cut:]), strict=True):
        path.write_bytes(part.tobytes())
    return paths


def examples(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and answer_mask of an arm, int64 [N, T]."""
    shards = list(open_bank(folder).shards())
    ids, mask = (np.concatenate([fixed_lists(shard.column(name)) for shard in shards]) for name in ("input_ids", "answer_mask"))
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(mask.astype(np.int64))


def train(config: Reach, arm: Path, out: Path) -> None:
    """Train a decoder on the arm's examples and save it. The loss is the mean over all tokens and the mean over answers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=BYTES,
            hidden_size=config.hidden_size,
            intermediate_size=2 * config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.hidden_size // config.heads,
            max_position_embeddings=2 * config.arm.length,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=config.steps, pct_start=0.1)
    ids, mask = examples(arm)
    order = torch.Generator().manual_seed(1)
    begin = time.monotonic()
    for step in range(config.steps):
        chosen = torch.randint(len(ids), (config.batch,), generator=order)
        tokens, answers = ids[chosen], mask[chosen][:, 1:].float()
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        answer = (nll * answers).sum() / answers.sum()
        optimizer.zero_grad()
        loss: Any = nll.mean() + answer
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99 or step == config.steps - 1:
            rate = (step + 1) / (time.monotonic() - begin)
            print(
                f"{arm.name}: step {step + 1}, NLL {nll.mean():.3f}, of answers {answer:.3f}, {rate:.1f} steps/s",
                file=sys.stderr,
            )
    model.save_pretrained(out)


def run(config: Reach, out: Path) -> list[str]:
    """Build, verify, train, score; what was found, in lines."""
    progress = progress_for(False)
    fillers = write_fillers(out / "filler", config.filler_bytes)
    folders = {arm: out / f"arm_{arm}" for arm in config.arms}
    for arm, folder in folders.items():
        build_in2(replace(config.arm, arm=arm), [fillers["train"]], folder, progress=progress)
    if wrong := [check for check in verify_in2(list(folders.values()), progress=progress) if not check.ok]:
        raise CorruptBank(f"{out}: {wrong[0].name}: {wrong[0].detail}")
    models = [out / f"model_{arm}" for arm in config.arms]
    for folder, model in zip(folders.values(), models, strict=True):
        if not (model / "model.safetensors").exists():
            train(config, folder, model)
    build_probes(config.probes, [fillers["val"]], out / "probes", progress=progress)
    scoring = ScoreConfig(models=tuple(ModelConfig(model=str(model)) for model in models))
    return list(score_lines(score_probes(scoring, out / "probes", out / "scores", progress=progress)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train a small model on arms b and c, and measure how far each finds a needle."
    )
    parser.add_argument("--out", type=Path, default=Path("in2_reach"), help="folder of everything (default: in2_reach)")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a smaller model")
    given = parser.parse_args(argv)
    print("\n".join(run(tiny() if given.tiny else in2_reach(), given.out)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"in2_reach: {error}")
