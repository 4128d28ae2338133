"""A retrieval router on a feature bank: queries find their paragraphs by two small projections of frozen vectors.

    python examples/train_router.py
    python examples/train_router.py --bank router/features --train train.jsonl --eval eval.jsonl --model Qwen/Qwen3-4B

Without arguments it makes the bank first, of the docstrings of the installed Python library with the model of the `demo` extra: in
all 45 seconds on two cores. The task: a function's summary line → the paragraphs of its docstring, among all candidates of
the eval split.

The model's vectors are frozen and lie in the bank, so training is matrix products over rows of a mapped file. What is said at the
end is recall on questions and texts that training never saw: what train has in common with the eval split is left out and counted,
and the setting is chosen on a part of train. The split is by function: a module's other functions, and near copies of a text, may be
on both sides.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, normalize

from arrowbank import FeatureBank, build, open_bank
from arrowbank.cli import demo
from arrowbank.cli.show import progress_for
from arrowbank.errors import ArrowbankError, InputError

KS = (1, 5, 10)
DEV_PART = 0.2
BATCH = 128
RESAMPLES = 2000

Vectors = Callable[[Sequence[int]], torch.Tensor]  # rows of the bank → [n, D] float32


@dataclass(frozen=True)
class Setting:
    """What is chosen on a part of train."""

    rank: int
    temperature: float

    def __str__(self) -> str:
        return f"rank {self.rank}, temperature {self.temperature}"


SETTINGS = [Setting(rank, temperature) for rank in (16, 64) for temperature in (0.05, 0.1)]


@dataclass(frozen=True)
class Episode:
    """A query, the candidates that are relevant to it, and the others: all rows of the bank, which has each text once."""

    query: int
    relevant: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """Questions (episodes with something to find), and the pool that each of them is looked for in."""

    questions: list[Episode]
    pool: list[int]


class Scorer(torch.nn.Module):
    """queries [Q, D], candidates [C, D] → scores [Q, C]: the cosine after a residual of low rank, one for each side.

    Two sides, because a question and its answer are not alike. The second factor starts at zero: training starts from the plain
    cosine, and moves away from it only as far as the episodes say.
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = torch.nn.ParameterList(torch.randn(width, rank) / width**0.5 for _ in range(2))
        self.up = torch.nn.ParameterList(torch.zeros(rank, width) for _ in range(2))

    def forward(self, queries: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        return self.project(queries, 0) @ self.project(candidates, 1).T

    def project(self, vectors: torch.Tensor, side: int) -> torch.Tensor:
        return normalize(vectors + vectors @ self.down[side] @ self.up[side], dim=-1)


def read_episodes(bank: FeatureBank, path: Path) -> list[Episode]:
    """The episodes of a file of JSON lines by row numbers; one for each query. InputError for a text that the bank lacks, and for
    a file of something else."""
    try:
        with path.open(
            encoding="utf-8"
        ) as file:  # its lines end with a newline, and with nothing else that ends lines in texts
            lines = [json.loads(line) for line in file if line.strip()]
        texts = list({text: None for line in lines for text in (line["query"], *(one["text"] for one in line["candidates"]))})
        relevances = [[bool(one["relevant"]) for one in line["candidates"]] for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: no file of episodes ({type(error).__name__}: {error}). Give JSON lines with a query and candidates, and of each "
            "candidate its text and whether it is relevant."
        ) from None
    row = dict(zip(texts, bank.rows(texts).tolist(), strict=True))
    if missing := [text for text in texts if row[text] < 0]:
        raise InputError(f"{path}: the bank lacks {len(missing)} of its texts, the first {missing[0][:60]!r}. Give its own.")
    relevant: dict[int, dict[int, None]] = {}
    others: dict[int, dict[int, None]] = {}
    for line, relevance in zip(lines, relevances, strict=True):
        query = row[line["query"]]
        right, wrong = relevant.setdefault(query, {}), others.setdefault(query, {})
        for one, is_relevant in zip(line["candidates"], relevance, strict=True):
            if (candidate := row[one["text"]]) != query:  # a text that finds itself shows nothing
                (right if is_relevant else wrong)[candidate] = None
    return [
        Episode(one, tuple(right), tuple(row for row in others[one] if row not in right)) for one, right in relevant.items()
    ]


def split_of(episodes: Sequence[Episode]) -> Split:
    """All candidates of all episodes are the pool, also of those where nothing is to be found."""
    pool = dict.fromkeys(row for one in episodes for row in (*one.relevant, *one.others))
    return Split([one for one in episodes if one.relevant], list(pool))


def without(episodes: Sequence[Episode], held: Sequence[Episode]) -> list[Episode]:
    """`episodes` without any text of `held`: those whose query or relevant text is there go, other candidates are taken out."""
    known = {row for one in held for row in (one.query, *one.relevant, *one.others)}
    kept = [one for one in episodes if not known & {one.query, *one.relevant}]
    return [Episode(one.query, one.relevant, tuple(row for row in one.others if row not in known)) for one in kept]


@torch.no_grad()
def recalls(scorer: Scorer, split: Split, vectors: Vectors) -> torch.Tensor:
    """The part of its relevant texts that each question has among its first k of the pool, [questions, KS]."""
    column = {row: at for at, row in enumerate(split.pool)}
    wanted = torch.zeros(len(split.questions), len(split.pool))
    scores = scorer(vectors([one.query for one in split.questions]), vectors(split.pool))
    for at, one in enumerate(split.questions):
        wanted[at, [column[row] for row in one.relevant]] = 1
        if one.query in column:
            scores[at, column[one.query]] = -torch.inf  # the question itself, where it is another one's candidate
    best = scores.topk(min(max(KS), len(split.pool)), dim=1).indices
    hits = wanted.gather(1, best)
    return torch.stack([hits[:, :k].sum(1) for k in KS], dim=1) / wanted.sum(1, keepdim=True)


def loss_of(scorer: Scorer, batch: list[Episode], vectors: Vectors, temperature: float, draw: random.Random) -> torch.Tensor:
    """Each question must score one of its relevant texts above all that the batch has: its own episode's other candidates, which
    are hard, and those of the other questions, which are many."""
    drawn = [draw.choice(one.relevant) for one in batch]
    candidates = list(dict.fromkeys([*drawn, *(row for one in batch for row in one.others)]))
    column = {row: at for at, row in enumerate(candidates)}
    scores = scorer(vectors([one.query for one in batch]), vectors(candidates)) / temperature
    unfair = torch.zeros(scores.shape, dtype=torch.bool)
    for at, (one, picked) in enumerate(zip(batch, drawn, strict=True)):
        # neither itself nor what else is relevant to it may count as a wrong answer
        unfair[at, [column[row] for row in (one.query, *one.relevant) if row in column and row != picked]] = True
    return cross_entropy(scores.masked_fill(unfair, -torch.inf), torch.tensor([column[row] for row in drawn]))


def train(questions: Sequence[Episode], vectors: Vectors, setting: Setting, epochs: int) -> Iterator[Scorer]:
    """A scorer that learns from `questions`, after every epoch. The same each time."""
    torch.manual_seed(0)
    draw = random.Random(0)
    scorer = Scorer(vectors([questions[0].query]).shape[1], setting.rank)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=1e-3)
    for _ in range(epochs):
        order = torch.randperm(len(questions)).tolist()
        for start in range(0, len(order), BATCH):
            optimizer.zero_grad(set_to_none=True)
            batch = [questions[at] for at in order[start : start + BATCH]]
            loss_of(scorer, batch, vectors, setting.temperature, draw).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        yield scorer


def choose(episodes: Sequence[Episode], vectors: Vectors, epochs: int) -> tuple[Setting, int]:
    """The setting and the number of epochs that do best on a part of `episodes`, having learnt from the rest."""
    order = torch.randperm(len(episodes), generator=torch.Generator().manual_seed(0)).tolist()
    cut = max(1, round(DEV_PART * len(episodes)))
    held = [episodes[at] for at in order[:cut]]
    dev, rest = split_of(held), split_of(without([episodes[at] for at in order[cut:]], held)).questions
    if not dev.questions or not rest:
        raise InputError(f"{len(episodes)} train episodes are too few to learn from some and choose by others. Give more.")
    print(f"choosing by {len(dev.questions):,} questions of train, pool {len(dev.pool):,}, learning from {len(rest):,} others")
    found: dict[tuple[Setting, int], float] = {}
    for setting in SETTINGS:
        for epoch, scorer in enumerate(train(rest, vectors, setting, epochs), 1):
            found[setting, epoch] = float(recalls(scorer, dev, vectors).mean())
        best = max(range(1, epochs + 1), key=lambda epoch: found[setting, epoch])
        print(f"  {setting}: mean recall {found[setting, best]:.3f} after epoch {best}", flush=True)
    return max(found, key=lambda way: found[way])


def report(before: torch.Tensor, after: torch.Tensor) -> None:
    """Recalls [questions, KS] before and after, and the difference with the 95 % interval of a bootstrap over questions."""
    picks = torch.randint(len(before), (RESAMPLES, len(before)), generator=torch.Generator().manual_seed(0))
    means = (after - before)[picks].mean(dim=1)
    print(f"{'recall on eval':>14}  cosine  trained  difference (95 %)")
    for at, k in enumerate(KS):
        low, high = means[:, at].quantile(torch.tensor([0.025, 0.975])).tolist()
        old, new = float(before[:, at].mean()), float(after[:, at].mean())
        print(f"{'@' + str(k):>14}  {old:6.3f}  {new:7.3f}  {new - old:+.3f} ({low:+.3f} to {high:+.3f})")


def run(folder: Path, sources: dict[str, Path], expect: dict[str, object], epochs: int) -> None:
    """Train on the bank in `folder`, which must be what `expect` says, and say what came of it."""
    bank = open_bank(folder, expect, kind=FeatureBank)  # vectors of another model, or of texts cut shorter, are refused here

    def vectors(rows: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(bank.take(rows)).float()  # float16 on disk; only these rows are read

    seen, held = (read_episodes(bank, sources[split]) for split in ("train", "eval"))
    test, clean = split_of(held), without(seen, held)
    if not test.questions:
        raise InputError(f"{sources['eval']}: no episode has a relevant candidate, so there is nothing to measure. Give more.")
    lost = len(split_of(seen).questions) - len(split_of(clean).questions)
    print(f"{len(bank):,} vectors; eval: {len(test.questions):,} questions, pool {len(test.pool):,}")
    print(f"train: {len(split_of(clean).questions):,} questions, after {lost:,} that share a text with eval were left out")
    setting, best = choose(clean, vectors, epochs)
    *_, scorer = train(split_of(clean).questions, vectors, setting, best)
    print(f"trained again on all of train: {setting}, {best} epochs")
    report(recalls(Scorer(bank.hidden_size, 1), test, vectors), recalls(scorer, test, vectors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("router_demo"), help="where a bank is made (%(default)s)")
    parser.add_argument("--episodes", type=int, default=10_000, help="at most so many functions for that bank (%(default)s)")
    parser.add_argument("--bank", type=Path, help="a feature bank that is there already; needs the next three")
    parser.add_argument("--train", type=Path, help="episodes to learn from: JSON lines whose candidates say `relevant`")
    parser.add_argument("--eval", type=Path, help="episodes to measure on")
    parser.add_argument("--model", help="the model that the bank must be of")
    parser.add_argument("--max-tokens", type=int, default=256, help="and the tokens of a text that it must be of (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="at most so many times through train (%(default)s)")
    given = parser.parse_args()
    begin = time.monotonic()
    if given.bank is None:
        sources, model = demo.write_episodes(given.out / "episodes", given.episodes), demo.minilm()
        build(demo.demo_bank(sources, model), given.out, progress=progress_for(False))
        bank = given.out / "features"
    elif given.train and given.eval and given.model:
        bank, sources, model = given.bank, {"train": given.train, "eval": given.eval}, given.model
    else:
        parser.error("--bank needs --train, --eval and --model")
    run(bank, sources, {"model": model, "max_tokens": given.max_tokens}, given.epochs)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except ArrowbankError as error:
        sys.exit(f"train_router: {error}")
