"""A draft head on a target bank: one layer that guesses what a target model says next, for speculative decoding.

    python examples/train_draft.py
    python examples/train_draft.py --bank targets --model Qwen/Qwen3-8B

Without arguments it makes everything first: a small target that learns the docstrings of the installed Python library (as
recipes/heal_tiny.py makes it), and the bank of its hidden states: in all 90 seconds on two cores.

The head is like EAGLE's: of a token it is given the target's tapped layers, and the embedding of the token after it; what it puts out
takes the place of the target's last hidden state one token on, and goes through the target's own head. Further tokens of a chain
are drafted from its own outputs instead of taps, and so is it trained: each step goes over the whole sequence again, the same way in
training and in use. (A server would keep keys and values of the steps before.)

What counts is said of rows that neither the target nor the draft has learnt: how often the draft's first choice is the target's, and
how many tokens of a chain are accepted: the target itself reads each chain, and a token counts when it and all before it are the
target's own first choices. A table of the target's most frequent choice after each token is what a draft has to beat.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from arrowbank import CaptureConfig, ModelConfig, TargetBank, capture, collate_targets, open_bank
from arrowbank.cli import demo
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError, InputError

CHAIN = 3
HELD_OUT = 10  # every tenth row
LAYERS = (0, 1, 2)
WINDOW = 96
EVERY = 8  # chains begin so many tokens apart
BATCH, LR = 16, 2e-3

Batch = dict[str, torch.Tensor]
# ids [N, P] and the taps of all but the last of them, [N, P - 1, L·H] → CHAIN drafted ids [N, CHAIN]: the newest token has been chosen,
# but the target has not read it yet
Drafter = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Draft(torch.nn.Module):
    """States and embeddings [N, S, H] → what should be the target's last hidden states one token on, [N, S, H].

    Attention is causal, so padding behind needs no mask: no real token sees it.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.fuse = torch.nn.Linear(layers * width, width, bias=False)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(3))  # states and embeddings differ in scale
        self.join = torch.nn.Linear(2 * width, width, bias=False)
        heads = max(1, width // 32)
        self.layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        joined = self.join(torch.cat([self.norms[0](states), self.norms[1](embedded)], dim=-1))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(joined.shape[1], dtype=joined.dtype)
        out: torch.Tensor = self.norms[2](self.layer(joined, src_mask=mask, is_causal=True))
        return out


class Target:
    """The frozen target: its embeddings and head, which the draft borrows, and its first choices."""

    def __init__(self, name: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval().requires_grad_(False)
        self.embed, self.head = self.model.get_input_embeddings(), self.model.get_output_embeddings()

    @torch.no_grad()
    def choices(self, ids: torch.Tensor) -> torch.Tensor:
        """The most likely next token after each of ids [N, S], [N, S]."""
        best: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits.argmax(-1)
        return best


def loss_of(draft: Draft, target: Target, batch: Batch) -> torch.Tensor:
    """How far the draft's next-token distributions are from the target's (cross-entropy), the mean over chain steps."""
    ids, mask = batch["input_ids"], batch["loss_mask"].bool()
    taps, last = batch["target_hidden_states"].float(), batch["target_last_hidden_states"].float()  # bfloat16 in the bank
    # position t: the states of token t, the embedding of token t + 1, and what the target says after that, which is of token t + 2
    states, embedded = draft.fuse(taps)[:, :-2], target.embed(ids)[:, 1:-1]
    wanted, counts = target.head(last)[:, 1:-1].softmax(-1), mask[:, 2:]
    losses = []
    for _ in range(CHAIN):
        states = draft(states, embedded)
        loss = torch.nn.functional.cross_entropy(target.head(states)[counts], wanted[counts], reduction="sum")
        losses.append(loss / counts.sum().clamp_min(1))
        # the next step is fed this one's outputs, which stand for states one token on
        states, embedded, wanted, counts = states[:, :-1], embedded[:, 1:], wanted[:, 1:], counts[:, 1:]
    return torch.stack(losses).mean()


def drafter(draft: Draft, target: Target) -> Drafter:
    """Chains of `draft`, greedily."""

    @torch.no_grad()
    def propose(ids: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        states, embedded, drafted = draft.fuse(taps), target.embed(ids)[:, 1:], []
        for _ in range(CHAIN):
            states = draft(states, embedded)
            drafted.append(target.head(states[:, -1]).argmax(-1))
            embedded = torch.cat([embedded, target.embed(drafted[-1])[:, None]], dim=1)[:, 1:]
        return torch.stack(drafted, dim=1)

    return propose


def table_drafter(target: Target, rows: Iterable[Batch]) -> Drafter:
    """The trivial draft: after each token what the target most often chose after it in `rows`, whatever came before."""
    pairs: Counter[tuple[int, int]] = Counter()
    for batch in rows:
        choices = target.head(batch["target_last_hidden_states"].float()).argmax(-1)
        counts = batch["loss_mask"][:, 1:].bool()
        pairs.update(zip(batch["input_ids"][:, :-1][counts].tolist(), choices[:, :-1][counts].tolist(), strict=True))
    table = torch.zeros(len(target.head.weight), dtype=torch.long)
    for (token, choice), _ in reversed(pairs.most_common()):  # the most frequent one is written last
        table[token] = choice

    def propose(ids: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
        drafted = [ids[:, -1]]
        for _ in range(CHAIN):
            drafted.append(table[drafted[-1]])
        return torch.stack(drafted[1:], dim=1)

    return propose


def measure(propose: Drafter, target: Target, rows: Iterable[Batch]) -> torch.Tensor:
    """Whether the target accepts the first 1, 2, … CHAIN tokens of each chain, [chains, CHAIN] of 0 and 1.

    A chain begins in place of every EVERY-th token, where that is a loss token. The target reads text and chain together, as it does
    to verify. InputError where there is no such place.
    """
    accepted = []
    for batch in rows:
        for place in range(EVERY, batch["input_ids"].shape[1], EVERY):
            begins = batch["loss_mask"][:, place].bool()
            ids, taps = batch["input_ids"][begins, :place], batch["target_hidden_states"][begins, : place - 1].float()
            if len(ids):
                drafted = propose(ids, taps)
                choices = target.choices(torch.cat([ids, drafted], dim=1))[:, place - 1 : -1]
                accepted.append((drafted == choices).float().cumprod(1))
    if not accepted:
        raise InputError(f"no held-out row has a loss token at a multiple of {EVERY}: nothing to measure. Give more rows.")
    return torch.cat(accepted)


def train(draft: Draft, target: Target, loader: DataLoader[Batch], epochs: int) -> None:
    optimizer = torch.optim.AdamW(draft.parameters(), LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=epochs * len(loader) + 1, pct_start=0.1)
    for epoch in range(epochs):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(draft, target, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"  epoch {epoch + 1} of {epochs}: loss {total / len(loader):.3f}", flush=True)


def run(bank: TargetBank, model: str, epochs: int) -> None:
    """Train a draft on the bank, and say what it came to on every tenth row."""
    facts, target, targets = bank.facts, Target(model), bank.to_torch()
    rows = [row for row, length in enumerate(bank.lengths) if length > CHAIN + 1]
    fit, held = (Subset(targets, [row for row in rows if (row % HELD_OUT == HELD_OUT - 1) == out]) for out in (False, True))
    if not fit or not held:
        raise InputError(f"{len(rows)} rows of more than {CHAIN + 1} tokens: too few to hold every tenth out. Give more.")
    torch.manual_seed(0)  # decides the draft's first weights and the order of the rows
    draft = Draft(facts.layers, facts.hidden_size)
    loader = DataLoader(fit, BATCH, shuffle=True, collate_fn=collate_targets)
    plain, test = (DataLoader(part, BATCH, collate_fn=collate_targets) for part in (fit, held))
    print(f"{len(fit):,} rows to learn from, {len(held):,} held out", flush=True)
    found = {"table": measure(table_drafter(target, plain), target, test)}
    found["before"] = measure(drafter(draft, target), target, test)
    train(draft, target, loader, epochs)
    found["after"] = measure(drafter(draft, target), target, test)
    print(f"accepted of {len(found['after']):,} held-out chains of {CHAIN}:")
    print("          " + "".join(f"first {step}  " for step in range(1, CHAIN + 1)) + "tokens a chain")
    for name, accepted in found.items():
        parts = "".join(f"{part:7.3f}  " for part in accepted.mean(0).tolist())
        print(f"{name:>8}  {parts}{accepted.sum(1).mean().item():14.3f}")


def make_bank(out: Path, texts: int, rows: int) -> tuple[Path, str]:
    """A small target and the bank of its hidden states in `out`; both folders. What is there already is not made again."""
    model, data = out / "target", out / "rows.jsonl"
    if not data.exists():
        print("making the target", flush=True)
        make_target(out, model, data, texts, rows)
    config = CaptureConfig(
        model=ModelConfig(model=str(model), device="cpu", dtype="float32"),
        data=data,
        target_layer_ids=LAYERS,
    )
    capture(config, out / "targets", progress=progress_for(False))
    return out / "targets", str(model)


def make_target(out: Path, model: Path, data: Path, texts: int, rows: int) -> None:
    """A Qwen3 that has learnt nine tenths of the docstrings' paragraphs, and windows of tokens for the capture, every tenth of which
    is of the others."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the recipes are beside this folder, and not installed
    from transformers import AutoTokenizer

    from recipes.heal_tiny import HealTiny, make_trunk

    found = list(dict.fromkeys(f"{text}\n" for module in demo.library() for one in module for text in one.paragraphs))
    random.Random(0).shuffle(found)  # windows are of every module
    held, learnt = found[:texts:HELD_OUT], [text for at, text in enumerate(found[:texts]) if at % HELD_OUT]
    out.mkdir(parents=True, exist_ok=True)
    (out / "learnt.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in learnt), encoding="utf-8")
    make_trunk(model, out / "learnt.jsonl", HealTiny(layers=max(LAYERS) + 1))
    tokenizer, windows = AutoTokenizer.from_pretrained(model), []
    for part in (learnt, held):
        ids = [token for one in tokenizer(part)["input_ids"] for token in one]  # end to end, as the target has learnt them
        windows.append(iter([ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]))
    half = data.with_suffix(".half")
    with half.open("w", encoding="utf-8") as file:
        for row in range(rows):
            if (window := next(windows[row % HELD_OUT == HELD_OUT - 1], None)) is None:
                break
            file.write(json.dumps({"id": row, "input_ids": window}) + "\n")
    half.rename(data)  # last, so that its being there says that all is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("draft_demo"), help="where all is made without --bank (%(default)s)")
    parser.add_argument("--texts", type=int, default=20_000, help="at most so many paragraphs for the target (%(default)s)")
    parser.add_argument(
        "--rows", type=int, default=1600, help="at most so many windows of 96 tokens for the bank (%(default)s)"
    )
    parser.add_argument("--bank", type=Path, help="a target bank that is there already; needs --model")
    parser.add_argument("--model", help="the target that the bank must be of, as the bank names it")
    parser.add_argument("--epochs", type=int, default=4, help="times through the bank's rows (%(default)s)")
    given = parser.parse_args()
    if (given.bank is None) != (given.model is None):
        parser.error("--bank and --model go together")
    begin = time.monotonic()
    bank, model = (given.bank, given.model) if given.bank else make_bank(given.out, given.texts, given.rows)
    # the head that is borrowed must fit the states that are learnt from: the same target, and states after its final norm
    expect = {"target_model_name_or_path": model, "last_hidden_norm": "post", "spans": "all"}
    run(open_bank(bank, expect, kind=TargetBank), model, given.epochs)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except ArrowbankError as error:
        sys.exit(f"train_draft: {error}")
