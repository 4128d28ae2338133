"""How fast a bank was built, from the lines of its build.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arrowbank.bank.manifest import LOG
from arrowbank.bank.reader import Bank
from arrowbank.drawing.frame import Plot
from arrowbank.drawing.markup import number, plural, seconds
from arrowbank.drawing.plots import Series, lines

PAUSE_SECONDS = 60.0  # a gap that is longer, and far longer than is usual, is no work
PAUSE_TIMES = 20.0
MOST_STEPS = 160
MOST = 2**53  # of seconds and rows


@dataclass(frozen=True)
class Pace:
    """When shards were finished: `at` seconds of work since the first of them, pauses cut out, and `rows` finished by then."""

    at: Sequence[float]
    rows: Sequence[int]
    pauses: Sequence[float]
    hosts: int


def read_pace(log: Path) -> Pace:
    """The pace that a build.jsonl tells of. A line that is cut or damaged is passed over; without the file there is nothing."""
    events = []
    for line in log.read_text("utf-8", "replace").splitlines() if log.exists() else ():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and event.get("event") == "shard" and _is_number(event.get("time"), event.get("rows")):
            events.append((float(event["time"]), int(event["rows"]), str(event.get("host"))))
    events.sort(key=lambda event: event[0])
    times = np.array([event[0] for event in events])
    gaps = np.diff(times)
    pause = gaps > max(PAUSE_SECONDS, PAUSE_TIMES * float(np.median(gaps))) if gaps.size else np.zeros(0, bool)
    worked = np.concatenate([[0.0], np.cumsum(np.where(pause, 0.0, gaps))])[: len(events)]
    finished = np.cumsum([event[1] for event in events], dtype=np.int64)
    return Pace(worked.tolist(), finished.tolist(), gaps[pause].tolist(), len({event[2] for event in events}))


def _is_number(*values: object) -> bool:
    """Whether all are numbers that a time or a row count can be."""
    return all(type(value) in (int, float) and 0 <= value < MOST for value in values)  # type: ignore[operator]


def pace_plots(name: str, bank: Bank, unit: str) -> list[Plot]:
    """Rows a second, and rows finished, over the time of the build; nothing for fewer than two shards."""
    pace = read_pace(bank.folder / LOG)
    if len(pace.at) < 2 or pace.at[-1] <= 0:
        return []
    kept = np.unique(np.linspace(0, len(pace.at) - 1, min(len(pace.at), MOST_STEPS)).astype(int))
    at, rows = np.array(pace.at)[kept], np.array(pace.rows)[kept]
    lasted = np.diff(at)
    rate = np.where(lasted > 0, np.diff(rows) / np.where(lasted > 0, lasted, 1), np.nan)
    whole = (pace.rows[-1] - pace.rows[0]) / pace.at[-1]
    beside = (
        f" {plural(len(pace.pauses), 'pause')}, the longest of {seconds(max(pace.pauses))}, cut out." if pace.pauses else ""
    )
    hosts = f" On {pace.hosts} machines." if pace.hosts > 1 else ""
    said = (
        f"{number(whole)} {unit} a second from the first of {plural(len(pace.at), 'shard')} to the last, "
        f"{seconds(pace.at[-1])} later.{hosts}{beside}"
    )
    steps = Series("rate", at.tolist(), [float(rate[0]), *rate.tolist()])
    time = "seconds of work since the first shard was finished"
    return [
        lines(f"Rate of the build, {name}", [steps], x_label=time, y_label=f"{unit} a second", summary=said, step=True),
        lines(
            f"{unit.capitalize()} finished, {name}",
            [Series("finished", at.tolist(), rows.astype(float).tolist())],
            x_label=time,
            y_label=unit,
            summary=f"{number(pace.rows[-1])} {unit}; a shard is counted when it is whole on the disk.",
            whole_y=True,
        ),
    ]


def one_step(bank: Bank) -> str:
    """What to say where there is no pace to draw."""
    pace = read_pace(bank.folder / LOG)
    if not pace.at:
        return f"There is no {LOG} that says when shards were finished."
    return "All of it is one shard, finished in one go: a rate needs two."
