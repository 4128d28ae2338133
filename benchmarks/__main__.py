"""Run the benchmarks one after another, print their table, and write it into the README.

    python -m benchmarks [NAME …]     all, or those named (`tokenize` is benchmarks/bench_tokenize.py), which writes nothing

A benchmark is a module bench_NAME.py with run(), which gives rows: what, ours, baseline, ratio, goal, unit. A goal that is a
number is the least ratio; one that is text speaks for itself. Each runs in a process of its own, so that none inherits
another's memory, threads or settings.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HERE = Path(__file__).parent
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
PAGES = (HERE.parent / "README.md", HERE.parent / "docs" / "benchmarks.md")
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")
RUN = "import importlib, json, sys; json.dump(importlib.import_module(sys.argv[1]).run(), open(sys.argv[2], 'w'))"


def names() -> list[str]:
    """The names of all benchmarks."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def measure(name: str) -> list[Row]:
    """The rows of the benchmark `name`, run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        subprocess.run([sys.executable, "-c", RUN, f"benchmarks.bench_{name}", str(answer)], cwd=HERE.parent, check=True)
        rows: list[Row] = json.loads(answer.read_text())
    return rows


def machine() -> str:
    """What the numbers were measured on, in a line."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
    return f"{os.cpu_count()} cores of {cpu_model()}, {platform.system()}, Python {platform.python_version()}, {versions}."


def cpu_model() -> str:
    """The processor's own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | ours | baseline | ratio | at least |", "|---|---|---|---|---|"]
    for row in rows:
        ours, baseline = (amount(row.get(side), row["unit"]) for side in ("ours", "baseline"))
        plain = row["unit"] == "cosine" or row.get("ratio") is None  # where a ratio would say nothing
        ratio = "" if plain else f"{row['ratio']:.2f}×"
        goal = f"{row['goal']}{'' if plain else '×'}" if isinstance(row["goal"], int | float) else row["goal"] or ""
        lines.append(f"| {row['what']} | {ours} | {baseline} | {ratio} | {goal} |")
    return "\n".join(lines)


def amount(value: float | None, unit: str) -> str:
    """A number with its unit, as precise as it is worth."""
    if value is None:
        return ""
    if unit == "cosine":
        return f"{value:.6f}"
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def write(text: str) -> Path | None:
    """Put `text` between the markers of the first page that has them; that page."""
    for page in PAGES:
        if page.exists() and START in (old := page.read_text(encoding="utf-8")) and END in old:
            before, after = old.split(START)[0], old.split(END)[1]
            page.write_text(f"{before}{START}\n{text}\n{END}{after}", encoding="utf-8")
            return page
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, print, and write the README's table.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of: {', '.join(names())} (default: all, and write the table)"
    )
    asked = parser.parse_args(argv).names
    if unknown := set(asked) - set(names()):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    rows: list[Row] = []
    for name in asked or names():
        print(f"{name} …", file=sys.stderr, flush=True)
        rows += measure(name)
    text = f"{table(rows)}\n\nMeasured on {machine()}"
    print(text)
    if not asked:
        page = write(text)
        print(f"written into {page}" if page else f"no page has the marker {START}: written nowhere", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
