"""Healing an MTP draft, whole and small: a trunk, its draft, the damage, and what a server would keep before and after.

    python recipes/heal_tiny.py [--out heal_tiny] [--tiny]

A small Qwen3 learns the docstrings of the installed Python library, with a tokenizer that is made of them too. It gets a draft: its own
last block, trained on its trunk bank. Then noise is put on every tensor of the draft, and it is healed; all is counted on windows that
no draft was trained on. A few minutes on two cores; what is in the folder already is not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arrowbank import HealConfig, ModelConfig, TrunkConfig, TrunkData, build_trunk, heal_draft
from arrowbank.cli import demo
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError
from arrowbank.models.device import quiet
from arrowbank.mtp.draft_files import load_draft, save_draft
from arrowbank.progress import SILENT, Progress

END = "<|end|>"
GOAL, KEPT, STORED = 1.5, 0.9, 0.01  # healed / damaged, healed / undamaged, as stored in bfloat16 / as trained


@dataclass(frozen=True, kw_only=True)
class HealTiny:
    """Everything that decides the run. The trunk reads `texts` paragraphs `passes` times; its drafts `tokens` of their tokens."""

    texts: int = 20_000
    vocabulary: int = 1024
    width: int = 128
    layers: int = 3
    window: int = 128
    batch: int = 16
    passes: float = 2.0
    lr: float = 3e-3
    tokens: int = 100_000
    chain: int = 3
    draft_epochs: float = 2.0
    heal_epochs: float = 1.0
    draft_lr: float = 1.5e-3
    damage: float = 0.8  # standard deviations of a tensor that are put on it as noise
    seed: int = 0


def heal_tiny() -> HealTiny:
    """The whole configuration."""
    return HealTiny()


def tiny() -> HealTiny:
    """The same in seconds: it shows the way, not the figures."""
    return HealTiny(
        texts=300, vocabulary=400, width=32, layers=2, window=48, passes=1.0, tokens=4000, chain=2, draft_epochs=1.0, lr=5e-3
    )


def trunk_config(given: HealTiny, model: Path, texts: Path) -> TrunkConfig:
    """The trunk bank of the checkpoint `model`; hidden states before the norm serve drafts that are fed either side."""
    return TrunkConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32"),
        sources=(TrunkData("docstrings", texts),),
        window=given.window,
        tokens=given.tokens,
        topk=64,
        chain=given.chain,
        last_hidden_norm="pre",
    )


def draft_config(given: HealTiny, model: Path) -> HealConfig:
    """How a trunk without a draft gets one: its last block, trained with its projection."""
    return HealConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32"),
        chain=given.chain,
        epochs=given.draft_epochs,
        lr=given.draft_lr,
        batch=8,
        refresh=25,
        eval_every=25,
        init=True,
        train_projection=True,
    )


def heal_config(given: HealTiny, model: Path, copies: Path) -> HealConfig:
    """How the damaged draft of `model` is healed, and the smaller copies that are written beside it."""
    return dataclasses.replace(
        draft_config(given, model),
        epochs=given.heal_epochs,
        init=False,
        also=tuple((codec, f"{copies}_{codec}") for codec in ("bf16", "int8", "nf4")),
    )


def run(
    out: Path, given: HealTiny, *, progress: Progress = SILENT, say: Callable[[str], object] = print
) -> dict[str, dict[str, Any]]:
    """Do it all in `out`, and `say` what came of it; the reports of the making of the draft and of its healing."""
    texts = _once(out / "docstrings.jsonl", lambda path: write_texts(path, given.texts))
    bare = _once(out / "trunk", lambda path: make_trunk(path, texts, given))
    build_trunk(trunk_config(given, bare, texts), out / "bank", progress=progress)
    made = heal_draft(draft_config(given, bare), out / "bank", out / "drafted", progress=progress)
    damaged = _once(out / "damaged", lambda path: damage(out / "drafted", path, given))
    build_trunk(trunk_config(given, damaged, texts), out / "damaged_bank", progress=progress)
    healed = heal_draft(heal_config(given, damaged, out / "healed"), out / "damaged_bank", out / "healed", progress=progress)
    for line in table(made, healed):
        say(line)
    say(f"\nLoss and acceptance over the steps: {out / 'healed.heal' / 'trace.svg'}")
    return {"made": made, "healed": healed}


def _once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made where it is not there: under another name first, so that a crash leaves no half of it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.with_name(f".{path.name}.half")
        if hidden.is_dir():
            shutil.rmtree(hidden)
        make(hidden)
        hidden.rename(path)
    return path


def write_texts(path: Path, count: int) -> None:
    """The first `count` paragraphs of docstrings of the Python library, one a line, each once."""
    found = dict.fromkeys(text for module in demo.library() for one in module for text in one.paragraphs)
    lines = [json.dumps({"text": f"{text}\n"}) + "\n" for text in list(found)[:count]]
    path.write_text("".join(lines), encoding="utf-8")


def make_trunk(folder: Path, texts: Path, given: HealTiny) -> None:
    """A Qwen3 that has learnt to go on with `texts`, and its tokenizer."""
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    rows = [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]
    tokenizer = _tokenizer(rows, given.vocabulary)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=given.width,
        intermediate_size=3 * given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=max(2, given.width // 32),
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4 * given.window,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(given.seed)
        model = Qwen3ForCausalLM(config)
        ids = [token for row in tokenizer.encode_batch(rows) for token in row.ids]
        _learn(model, torch.tensor(ids), given)
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END).save_pretrained(folder)


def _tokenizer(rows: Sequence[str], vocabulary: int) -> Any:
    """A byte-level BPE of so many ids; 0 is the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator(rows, trainer)
    return tokenizer


def _learn(model: Any, ids: torch.Tensor, given: HealTiny) -> None:
    """Next tokens at random places of `ids`; warm-up and cosine."""
    tokens = given.batch * given.window
    steps = max(1, math.ceil(given.passes * len(ids) / tokens))
    optimizer = torch.optim.AdamW(model.parameters(), given.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, total_steps=steps + 1, pct_start=0.1)
    for _ in range(steps):
        starts = torch.randint(len(ids) - given.window, (given.batch, 1))
        batch = ids[starts + torch.arange(given.window)]
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


def damage(source: Path, target: Path, given: HealTiny) -> None:
    """The checkpoint `source` with noise on every tensor of its draft, as `target`."""
    from transformers import AutoModelForCausalLM

    with quiet():  # transformers says that it leaves the draft's tensors out
        trunk = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    draft = load_draft(trunk, source)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(given.seed + 1)
        for tensor in draft.tensors().values():
            tensor.add_(given.damage * tensor.std() * torch.randn_like(tensor))
    save_draft(draft, source, target, provenance={"made_by": "recipes/heal_tiny.py", "damage": given.damage})


def table(made: dict[str, Any], healed: dict[str, Any]) -> list[str]:
    """Acceptance on the held-out windows, by chain step, of the draft in each of its states; then the goals."""
    stored = {one["codec"]: one for one in healed["files"]}
    states = {"before the damage": made["after"], "damaged": healed["before"], "healed": healed["after"]}
    states |= {f"stored, {codec}": one["accepted"] for codec, one in stored.items()}
    states["control (must miss)"] = healed["after"]["control"]
    steps = "".join(f"{f'step {step}':>9}" for step in range(1, len(made["after"]["rates"]) + 1))
    lines = [f"\n{'rate of acceptance':23}{steps}{'drafts a round':>17}"]
    for name, found in states.items():
        rates = "".join("        –" if rate is None else f"{rate:9.3f}" for rate in found["rates"])
        lines.append(f"{name:23}{rates}{found['score']:17.3f}")
    scores = {name: found["score"] for name, found in states.items()}
    rows = made["after"]["rows"]
    more, part = (scores["healed"] / max(scores[name], 1e-9) for name in ("damaged", "before the damage"))
    off = abs(scores["stored, bf16"] - scores["healed"])
    lines.append(f"\nrows counted by step: {', '.join(f'{count:,}' for count in rows)}")
    lines.append(
        f"healed: {more:.2f} times the damaged draft's (goal: {GOAL}), {part:.2f} of the undamaged one's (goal: {KEPT});"
    )
    lines.append(f"bfloat16 as stored: {off:.4f} from the trained weights (goal: {STORED})")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make a small trunk and its draft, damage the draft, and heal it.")
    parser.add_argument("--out", type=Path, default=Path("heal_tiny"), help="folder of it all (default: heal_tiny)")
    parser.add_argument("--tiny", action="store_true", help="in seconds: the way, not the figures")
    asked = parser.parse_args(argv)
    run(asked.out, tiny() if asked.tiny else heal_tiny(), progress=progress_for(False))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ArrowbankError as error:
        sys.exit(f"heal_tiny: {error}")
