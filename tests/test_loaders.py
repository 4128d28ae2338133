"""The rules of loaders, against the windows that the loaders themselves delivered (recorded by tests/peers/record_loaders.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrowbank.formats.loaders import LOADERS, RANDOM, Batches, LoaderStops, expected_whole, whole_in_windows

EVERY: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "loaders.json").read_text())
RECORDS = [record for record in EVERY if record["loader"] != RANDOM]
DRAWN = [record for record in EVERY if record["loader"] == RANDOM]


def case_name(record: dict[str, Any]) -> str:
    return f"{record['loader']}-{record['tokens']}-{record['batch']}x{record['ranks']}"


def test_every_loader_was_run() -> None:
    assert {record["loader"] for record in EVERY} == {*LOADERS, RANDOM}


@pytest.mark.parametrize("record", RECORDS, ids=case_name)
def test_the_windows_are_those_that_the_loader_delivered(record: dict[str, Any]) -> None:
    loader = LOADERS[record["loader"]]
    tokens = [count // 16 * 16 for count in record["tokens"]] if record["loader"] == "megatron-core" else record["tokens"]
    batches = Batches(record["length"], record["batch"], record["ranks"])
    for rank, recorded in enumerate(record["windows"]):
        if isinstance(recorded, str):
            with pytest.raises(LoaderStops):
                loader.cut(tokens, batches, rank)
            continue
        cut = loader.cut(tokens, batches, rank if loader.each_rank else 0)
        found = [[number, int(start)] for number, starts in enumerate(cut) for start in starts]
        if record["loader"] == "megatron-core":  # which document of a file is the last is chance
            found = [[number for number, _ in found], [number for number, _ in recorded]]
            assert found[0] == found[1]
        else:
            assert found == recorded


@pytest.mark.parametrize("record", DRAWN, ids=case_name)
def test_the_average_is_over_the_places_that_were_drawn(record: dict[str, Any]) -> None:
    [tokens], length = record["tokens"], record["length"]
    spans = [(begin, end) for begin in range(tokens) for end in range(begin + 1, tokens)]
    plain = sum(start <= begin and end <= start + length for start in record["windows"] for begin, end in spans)
    begin, end = np.array(spans).T
    assert expected_whole(begin, end, tokens, length) == pytest.approx(plain / len(record["windows"]))
    with pytest.raises(LoaderStops):
        expected_whole(begin, end, length, length)


@pytest.mark.parametrize("seed", range(20))
def test_whole_is_what_a_plain_search_of_all_windows_finds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    length = int(draw.integers(4, 20))
    starts = np.sort(draw.choice(np.arange(0, 400, length), size=int(draw.integers(0, 12)), replace=False)).astype(np.int64)
    begin = draw.integers(0, 400, 50)
    end = begin + draw.integers(1, length + 2, 50)
    read = length + int(draw.integers(0, 2))
    plain = [any(start <= b and e < start + read for start in starts) for b, e in zip(begin, end, strict=True)]
    assert whole_in_windows(begin, end, starts, read).tolist() == plain
