"""`python -m tests.soak --minutes M`: attack for so long, then print what was tried and what failed. Exit code 1 if anything did."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import os
import pkgutil
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stderr
from pathlib import Path

from tests.kill import PRELOAD
from tests.soak.tally import Tally, load, machine
from tests.soak.world import World

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NO_COLOR": "1",
    # no address that is tried leads anywhere
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_MAX_ATTEMPTS": "1",
}
SHARES = {"kills": 0.45, "disks": 0.05, "damage": 0.2, "inputs": 0.3}  # of the time
SAVED_EVERY_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument(
        "--state",
        type=Path,
        default=None,
        help="a JSON file in which the figures of several runs add up; beside it, as .md, the table",
    )
    parser.add_argument("--only", default="", help="an attack, or one of its rounds: kills, damage:17")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"soak: --seed {seed}", flush=True)
    scratch = Path(tempfile.mkdtemp(prefix="arrowbank-soak-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    os.environ.update(QUIET, HF_HOME=str(scratch / "hf"), TMPDIR=str(scratch))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # no soak leaves its folder behind
    try:
        return _soak(scratch, seed, options)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _soak(scratch: Path, seed: int, options: argparse.Namespace) -> int:
    _preload()
    world = World(scratch)
    tally, earlier = Tally(), load(options.state)
    attack, _, number = options.only.partition(":")
    shares = {attack: 1.0} if attack else SHARES
    attacks = {name: importlib.import_module(f"tests.soak.{name}").attack for name in shares}
    spent, rounds = dict.fromkeys(shares, 0.0), dict.fromkeys(shares, int(number or 0))
    started = saved = time.monotonic()
    while time.monotonic() - started < 60 * options.minutes:
        name = min(shares, key=lambda name: spent[name] / shares[name])
        before = time.monotonic()
        where = f"--seed {seed} --only {name}:{rounds[name]}"
        for one in attacks[name](world, random.Random(f"{seed}/{name}/{rounds[name]}")):
            tally.add(one, where)
            if one.wrong:
                print(f"{where}: {one.attack}, {one.kind}: {one.wrong}\n{one.detail[-4000:]}\n", flush=True)
        rounds[name] += 1
        spent[name] += time.monotonic() - before
        tally.seconds = time.monotonic() - started
        if time.monotonic() - saved > SAVED_EVERY_S:
            _save(tally, earlier, options.state)
            saved = time.monotonic()
        if number:
            break
    total = _save(tally, earlier, options.state)
    text = f"{total.seconds / 60:.0f} minutes; {machine()}\n\n{total.table()}\n"
    print(text)
    if options.state:
        options.state.with_suffix(".md").write_text(text)
    return int(any(tally.failed.values()))


def _save(tally: Tally, earlier: Tally, path: Path | None) -> Tally:
    total = Tally()
    total.merge(earlier)
    total.merge(tally)
    if path is not None:
        total.save(path)
    return total


def _preload() -> None:
    """Everything that the children would else import one by one. Nothing is computed here: a fork inherits no threads."""
    import arrowbank.cli

    modules = [
        module.name for module in pkgutil.walk_packages(arrowbank.__path__, "arrowbank.") if "__main__" not in module.name
    ]
    for name in (*PRELOAD, *modules, "pydantic"):
        importlib.import_module(name)
    with redirect_stderr(io.StringIO()):
        arrowbank.cli.main(["info", os.devnull])  # a refusal: what Typer imports at the first call
    gc.freeze()  # what the children's collections would copy


if __name__ == "__main__":
    sys.exit(main())
