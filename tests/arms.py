"""IN2 arms for tests: the golden fillers, the draws as they are written down (one at a time), and arms that are broken on purpose."""

from __future__ import annotations

import functools
import json
import random
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from arrowbank import In2Config, build_in2
from arrowbank.bank.columns import fixed_lists, list_values, values_of

GOLDEN = Path(__file__).parent / "golden" / "in2" / "expected.json"
M = 1_000_003
SMALL = {"length": 600, "examples": 7, "triples": 6, "key_len": 2, "val_len": 3, "alphabet": 300, "min_distance": 8}
VOCAB = 1000


@functools.cache
def golden_filler(number: int) -> npt.NDArray[np.uint16]:
    """The fillers of the golden cases."""
    if number == 0:
        rng = random.Random(12345)
        return np.array([rng.randrange(50304) for _ in range(200_000)], "<u2")
    return ((np.arange(150_000) * 7919 + 13) % 50304).astype("<u2")


def save_golden_fillers(folder: Path) -> list[Path]:
    paths = [folder / f"filler_train_{number}.bin" for number in (0, 1)]
    for number, path in enumerate(paths):
        path.write_bytes(golden_filler(number).tobytes())
    return paths


def golden_cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
    return cases


def golden_options(case: dict[str, Any]) -> str:
    """A golden case's options as they are spelled today."""
    options: str = case["options"]
    return options.replace("--shards", "--raw-shards")


def golden_config(case: dict[str, Any]) -> In2Config:
    words = shlex.split(golden_options(case))
    named = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    return In2Config(**{name: value if name == "arm" else int(value) for name, value in named.items()})  # type: ignore[arg-type]


def save_filler(path: Path, tokens: int = 5000, vocab: int = VOCAB, seed: int = 1) -> Path:
    path.write_bytes(np.random.default_rng(seed).integers(0, vocab, tokens).astype("<u2").tobytes())
    return path


def small(arm: str = "c", **options: Any) -> In2Config:
    """Options of a small arm, whose Arrow shards hold three examples."""
    files = {"raw_shards": 2} if options.get("mirror", True) else {}
    return In2Config(arm=arm, **{"vocab": VOCAB, "shard_tokens": 3 * 600, **files, **SMALL, **options})


@dataclass
class Example:
    """What the draws as they are written down give."""

    tokens: list[int]
    records: list[dict[str, int]]
    decoys: int


class NoPlace(Exception):
    """Something found no place."""


def as_written(config: In2Config, fillers: Sequence[npt.NDArray[Any]], example: int) -> Example:
    """One example by the draws one at a time, with CPython's own generator and nothing of the package."""
    length, span = config.length, config.key_len + config.val_len
    base = ((config.seed * M + length) * M + example) * M
    site, arm, fill = (random.Random(base + offset) for offset in (7, 1000 + ord(config.arm), 99))
    filler = fillers[example % len(fillers)]
    start = fill.randrange(len(filler) - length)
    tokens = [int(token) for token in filler[start : start + length]]
    if config.arm == "a":
        return Example(tokens, [], 0)
    low, high, sites = span + config.min_distance, length - 4 - span, list[int]()
    for _ in range(400 * config.triples):
        place = low + site.randrange(high + 1 - low)
        if all(abs(place - other) >= 2 * span for other in sites):
            sites.append(place)
        if len(sites) == config.triples:
            break
    else:
        raise NoPlace
    sites.sort()
    keys = [[site.randrange(config.alphabet) for _ in range(config.key_len)] for _ in sites]
    values = [[site.randrange(config.alphabet) for _ in range(config.val_len)] for _ in sites]
    order = list(range(config.triples))
    site.shuffle(order)
    taken, records = list(sites), []

    def free(place: int) -> bool:
        return all(place + span <= other or other + span <= place for other in taken)

    def draw(bound: int) -> int | None:
        for _ in range(400):
            if free(place := arm.randrange(bound)):
                return place
        return None

    for number, probe in enumerate(sites):
        planted = keys[order[number]] + values[order[number]]
        tokens[probe : probe + span] = planted
        needle = probe - span if config.arm == "b" else draw(probe - config.min_distance - span + 1)
        if needle is None or not free(needle):
            raise NoPlace
        taken.append(needle)
        tokens[needle : needle + span] = planted
        answer = probe + config.key_len
        records.append(
            {
                "needle_start": needle,
                "probe_start": probe,
                "answer_start": answer,
                "distance": probe - needle,
                "csv_first": answer - 1,
            }
        )
    decoys = 0
    for _ in range(config.decoy_count):
        planted = [site.randrange(config.alphabet) for _ in range(span)]
        if (place := draw(length - 4 - span + 1)) is not None:
            taken.append(place)
            tokens[place : place + span] = planted
            decoys += 1
    return Example(tokens, records, decoys)


@dataclass
class Rows:
    """One Arrow shard of a committed arm, open for breaking: arrays over its bytes, and over those of the raw shards."""

    ids: npt.NDArray[Any]
    mask: npt.NDArray[Any]
    raw: npt.NDArray[Any]
    columns: dict[str, npt.NDArray[Any]]


def break_arm(folder: Path, change: Callable[[Rows], None]) -> None:
    """Change a committed arm in place, the files' sizes left as they are: the first Arrow shard, and the first raw shard."""
    shard, raw_path = folder / "data-00000.arrow", min(folder.glob("in2*_00000.bin"))
    data, raw = bytearray(shard.read_bytes()), np.fromfile(raw_path, "<u2")
    batch = pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
    columns = {
        name: _writable(list_values(batch.column(name))[0])
        for name in ("needle_start", "probe_start", "answer_start", "distance", "decoy_start")
    }
    columns |= {
        name: _writable(values_of(batch.column(name))) for name in ("decoys_placed", "filler", "filler_start", "example")
    }
    ids, mask = _writable(fixed_lists(batch.column("input_ids"))), _writable(fixed_lists(batch.column("answer_mask")))
    change(Rows(ids, mask, raw, columns))
    shard.write_bytes(data)
    raw_path.write_bytes(raw.tobytes())


def _writable(view: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory, which is the test's own, as an array that can be written."""
    interface = dict(view.__array_interface__)
    interface["data"] = (interface["data"][0], False)

    class Holder:
        __array_interface__ = interface
        kept = view

    return np.asarray(Holder())


def build_small(folder: Path, arm: str = "c", **options: Any) -> Path:
    """A committed small arm in `folder`/`arm`, with its filler beside it."""
    filler = folder / "filler.bin"
    if not filler.exists():
        save_filler(filler)
    out = folder / str(options.pop("name", arm))
    build_in2(small(arm, **options), [filler], out)
    return out
