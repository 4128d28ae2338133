"""How the command line shows long work: a bar on a terminal, JSON lines with --json, a line a phase elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from arrowbank.bank.files import human_bytes
from arrowbank.progress import Phase, Progress

if TYPE_CHECKING:
    from arrowbank.bank.checks import Check
    from arrowbank.engine.stage import Estimate

CHECK_FAILED = 1
EVENT_SECONDS = 0.5
LINE_SECONDS = 30.0


class _Meter:
    """A phase's counts and rates; `show` draws it at most every `pause` seconds, and once at the end."""

    def __init__(
        self, name: str, total: int | None, unit: str, texts: int | None, show: Callable[[_Meter], None], pause: float
    ) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0
        self._texts_a_unit = 1.0 if unit == "texts" else (texts or 0) / (total or 1)
        self._texts = 0.0
        self._show, self._pause = show, pause
        self._start = self._shown = time.monotonic()

    def advance(self, done: int, *, texts: int | None = None) -> None:
        self.done += done
        self._texts += done * self._texts_a_unit if texts is None else texts
        if time.monotonic() - self._shown >= self._pause:
            self._draw()

    def _draw(self) -> None:
        self._shown = time.monotonic()
        self._show(self)

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._draw()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)

    @property
    def texts_per_second(self) -> float | None:
        return round(self._texts / self.seconds, 1) if self._texts else None

    @property
    def eta_seconds(self) -> float | None:
        if not self.total or not self.done:
            return None
        return round(self.seconds / self.done * max(0, self.total - self.done), 1)


@dataclass(frozen=True)
class PrintedProgress:
    """A phase printed by `show`, at most every `pause` seconds and at its end; messages go to standard error."""

    show: Callable[[_Meter], None]
    pause: float

    def phase(self, name: str, total: int | None, *, unit: str = "texts", texts: int | None = None) -> Phase:
        return _Meter(name, total, unit, texts, self.show, self.pause)

    def message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _print_event(meter: _Meter) -> None:
    """One JSON event a line on standard output."""
    event = {"phase": meter.name, "done": meter.done, "total": meter.total, "unit": meter.unit}
    event |= {"texts_per_second": meter.texts_per_second, "eta_seconds": meter.eta_seconds}
    print(json.dumps(event), flush=True)


def _print_line(meter: _Meter) -> None:
    """A line on standard error, for logs."""
    of = f" of {meter.total:,}" if meter.total is not None else ""
    rate = f", {meter.texts_per_second:,.0f} texts/s" if meter.texts_per_second else ""
    left = f", {meter.eta_seconds:,.0f} s left" if meter.eta_seconds else ""
    print(f"{meter.name}: {meter.done:,}{of} {meter.unit} in {meter.seconds:,.1f} s{rate}{left}", file=sys.stderr, flush=True)


class BarProgress:
    """A bar with rate and time left, for a person at a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def phase(self, name: str, total: int | None, *, unit: str = "texts", texts: int | None = None) -> Phase:
        return _Bar(self._console, name, total, unit, texts)

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)


class _Bar(_Meter):
    def __init__(self, console: Console, name: str, total: int | None, unit: str, texts: int | None) -> None:
        super().__init__(name, total, unit, texts, self._update, 0.1)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}  {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bars.add_task(name, total=total, unit=unit, rate="")

    def _update(self, meter: _Meter) -> None:
        rate = f"{self.texts_per_second:,.0f} texts/s" if self.texts_per_second else ""
        self._bars.update(self._task, completed=self.done, rate=rate)

    def __enter__(self) -> Phase:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._bars.stop()


def progress_for(as_json: bool) -> Progress:
    """The way to show progress that suits where the output goes."""
    if as_json:
        return PrintedProgress(_print_event, EVENT_SECONDS)
    console = Console(stderr=True)
    return BarProgress(console) if console.is_terminal else PrintedProgress(_print_line, LINE_SECONDS)


def done_event(manifest: dict[str, Any]) -> None:
    """The last event of --json."""
    print(json.dumps({"phase": "done", "manifest": manifest}, ensure_ascii=False), flush=True)


def finish(as_json: bool, manifest: dict[str, Any], sentence: str) -> None:
    """End a verb with its manifest (--json) or a sentence."""
    if as_json:
        done_event(manifest)
    else:
        print(sentence, flush=True)


def show_checks(checks: list[Check], as_json: bool) -> None:
    """Print a proof line by line; exit code 1 where a check failed."""
    ok = all(check.ok for check in checks)
    if as_json:
        print(
            json.dumps({"phase": "done", "ok": ok, "checks": [asdict(check) for check in checks]}, ensure_ascii=False),
            flush=True,
        )
    else:
        width = max(8, *(len(check.name) for check in checks))
        for check in checks:
            print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:{width}}  {check.detail}")
    if not ok:
        raise typer.Exit(CHECK_FAILED)


def fail_on(problems: Sequence[str]) -> None:
    """Say why a result does not pass, on standard error; exit code 1 where anything is said."""
    for problem in problems:
        typer.echo(f"FAIL  {problem}", err=True)
    if problems:
        raise typer.Exit(CHECK_FAILED)


def unfinished(out: str, manifest: dict[str, Any]) -> str:
    """What is said of a bank that is not committed."""
    return f"{out}: {manifest['rows']:,} rows so far, not committed."


def show_estimate(found: Estimate, as_json: bool) -> None:
    """Print what a bank will take; exit code 1 where that is too much."""
    if as_json:
        facts = {**asdict(found), **found.counts, "total_bytes": found.total_bytes, "fits": found.fits}
        print(json.dumps({"phase": "estimate", **facts}), flush=True)
    else:
        parts = {**({"shards": found.shard_bytes} if found.shards else {}), **found.beside}
        budget = "" if found.budget_bytes is None else f", the budget is {human_bytes(found.budget_bytes)}"
        lines = {
            "rows": f"{found.rows:,}" + ("" if found.tokens is None else f" ({found.tokens:,} tokens)"),
            **({"shards": f"{found.shards:,}"} if found.shards else {}),
            **{name.replace("_", " "): f"{count:,}" for name, count in found.counts.items()},
            "disk": f"{human_bytes(found.total_bytes)} of {human_bytes(found.free_bytes)} free{budget}",
        }
        if len(parts) > 1:
            lines[""] = f"({', '.join(f'{name} {human_bytes(size)}' for name, size in parts.items())})"
        if found.seconds is not None:
            speed = f", {found.rows / found.seconds:,.0f} rows/s" if found.seconds else ""
            lines["time"] = f"{_duration(found.seconds)} with one worker{speed}"
        width = max(map(len, lines)) + 2
        print(*(f"{name:{width}}{text}" for name, text in lines.items()), sep="\n")
    if not found.fits:
        raise typer.Exit(CHECK_FAILED)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
