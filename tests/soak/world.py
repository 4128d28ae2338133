"""Small inputs of every kind, and every command that writes something, over them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.kill import count_moments
from tests.soak.children import Child, command_line, empty

TABLE = "--encoder tests.banks:TableEncoder --shard-rows 12 --max-batch 4 --token-budget 64"
ARM = "--length 600 --examples 7 --triples 6 --key-len 2 --val-len 3 --alphabet 300 --vocab 1000 --filler filler.bin"
CAPTURE = "--model qwen3 --source chats.jsonl --layers 0,1 --max-length 60 --max-batch 4 --token-budget 300 --min-loss-tokens 1"


@dataclass(frozen=True)
class Command:
    """A command as it is typed in the world's folder; it writes `{out}` and what is beside it, in the folder `{run}`.

    `workers`: it starts processes. `weight`: how often it is drawn; those that start an interpreter per worker cost seconds.
    `keeps`: shards that are finished stay as they are when it resumes. `code`: how it ends when nobody disturbs it.
    """

    name: str
    line: str
    workers: bool = False
    weight: float = 1.0
    keeps: bool = True
    code: int = 0

    def run(self, run_folder: Path) -> int:
        argv = self.line.format(run=run_folder, out=run_folder / "out", world=Path.cwd()).split()
        by_hand = {"scan-with-processes": _scan_with_processes, "in2-with-processes": _build_in2_with_processes}
        if argv[0] in by_hand:  # the command line starts them for large inputs only
            return by_hand[argv[0]](Path(argv[1]))
        return command_line(argv)


def _exports(bank: str, *formats: str) -> list[Command]:
    return [Command(f"export {name}", f"export {bank} --to {name} --out {{out}}", weight=0.5) for name in formats]


COMMANDS = [
    Command("scan", "scan --source t=episodes.jsonl --source e=more.jsonl --out {out}", keeps=False),
    Command("scan --onto", "scan --source t=episodes.jsonl --source e=more.jsonl --onto texts --out {out}", keeps=False),
    Command("scan, processes", "scan-with-processes {out}", workers=True, weight=12, keeps=False),
    Command("tokenize", "tokenize texts --tokenizer bpe --workers 1 --out {out}", keeps=False),
    Command(
        "tokenize, processes", "tokenize texts --tokenizer bpe --workers 2 --out {out}", workers=True, weight=14, keeps=False
    ),
    Command("encode", f"encode tokens {TABLE} --out {{out}}", weight=2),
    Command("encode, processes", f"encode tokens {TABLE} --workers 2 --out {{out}}", workers=True, weight=0.4),
    Command("encode, a model", "encode tokens --model qwen3 --shard-rows 12 --device cpu --out {out}", weight=0.5),
    Command("encode --onto", f"encode grown/tokens {TABLE} --onto features --out {{out}}"),
    Command("build", f"build --source t=episodes.jsonl --tokenizer bpe --workers 1 {TABLE} --out {{out}}", keeps=False),
    Command(
        "build --onto",
        f"build --source t=more.jsonl --tokenizer bpe --workers 1 {TABLE} --onto built --out {{out}}",
        keeps=False,
    ),
    Command("merge texts", "merge texts other/texts --out {out}"),
    Command("merge features", "merge features other/features --out {out}"),
    Command("merge targets", "merge targets other/targets --out {out}"),
    Command("select texts", "select texts --where kind=query --out {out}"),
    Command("select tokens", "select tokens --limit 20 --out {out}"),
    Command("select features", "select features --where kind=query --out {out}"),
    Command("select targets", "select targets --limit 3 --out {out}"),
    Command("targets import", "targets import dump --target-model m --layers 1,11,21 --max-shard-bytes 600 --out {out}"),
    Command("targets import fp8", "targets import dump --target-model m --layers 1,11,21 --codec fp8 --out {out}"),
    Command("targets import --to deepspec", "targets import dump --target-model m --layers 1,11,21 --to deepspec --out {out}"),
    Command("targets import a cache", "targets import export-deepspec --out {out}"),
    Command("targets capture", f"targets capture {CAPTURE} --max-shard-bytes 20000 --device cpu --out {{out}}"),
    Command(
        "targets capture, processes",
        f"targets capture {CAPTURE} --max-shard-bytes 20000 --device cpu --workers 2 --out {{out}}",
        workers=True,
        weight=0.15,
    ),
    Command("in2 build a", f"in2 build --arm a {ARM} --raw-shards 2 --min-distance 8 --out {{out}}"),
    Command("in2 build c", f"in2 build --arm c {ARM} --raw-shards 2 --min-distance 8 --out {{out}}"),
    Command("in2 build, processes", "in2-with-processes {out}", workers=True, weight=0.3),
    Command("in2 probes", "in2 probes --length 300 --filler ids.bin --vocab 500 --alphabet 300 --out {out}"),
    Command("in2 score", "in2 score probes --model qwen3 --device cpu --draws 20 --no-plot --out {out}", weight=0.5),
    Command(
        "trunk build",
        "trunk build --model draft --source a=rows.jsonl --window 24 --topk 8 --tokens 600 --chain 2 --last-hidden-norm pre "
        "--max-shard-bytes 12000 --device cpu --out {out}",
    ),
    Command(
        "trunk build, processes",
        "trunk build --model draft --source a=rows.jsonl --window 24 --topk 8 --tokens 600 --chain 2 --last-hidden-norm pre "
        "--max-shard-bytes 12000 --device cpu --workers 2 --out {out}",
        workers=True,
        weight=0.15,
    ),
    Command(
        "heal",
        "heal --trunk trunk --model draft --chain 2 --epochs 0.5 --batch 2 --eval-every 5 --refresh 7 --device cpu "
        "--also int8={run}/small --dump {run}/dump --out {out}",
        weight=0.4,
        keeps=False,
        code=1,  # so small a draft learns nothing, and heal says so
    ),
    *_exports("targets", "deepspec", "specforge-eagle3", "specforge-dflash", "specforge-dspark", "modelopt"),
    *_exports("targets-pre", "speculators"),
    *_exports("arm", "raw", "llmc", "nanogpt-npy", "megatron", "nanotron"),
    *_exports("features", "npy", "parquet"),
    Command("push", "push features file://{out}", weight=0.5, keeps=False),
    Command("pull", "pull file://{world}/pushed {out}", keeps=False),
    Command("report", "report features --points 20 --neighbours 2 --out {run}/page.html", weight=0.5, keeps=False),
]
"""Every command that writes. Checks that only read (`verify`, `targets verify`, `in2 verify`) are what the damage is shown to."""

SUBJECTS = (
    *("texts", "tokens", "features", "targets", "targets-fp8", "arm", "probes", "trunk", "merged", "selected"),
    *(f"export-{name}" for name in ("deepspec", "specforge-eagle3", "specforge-dflash", "specforge-dspark", "speculators")),
    *(f"export-{name}" for name in ("modelopt", "raw", "llmc", "nanogpt-npy", "megatron", "nanotron", "npy", "parquet")),
)
"""The world's folders that `verify` is shown, damaged."""

PREPARE = [
    "scan --source t=episodes.jsonl --out texts",
    "scan --source t=episodes.jsonl --source e=more.jsonl --onto texts --out grown/texts",
    "scan --source t=more.jsonl --out other/texts",
    "tokenize texts --tokenizer bpe --workers 1 --out tokens",
    "tokenize grown/texts --tokenizer bpe --workers 1 --out grown/tokens",
    "tokenize other/texts --tokenizer bpe --workers 1 --out other/tokens",
    f"encode tokens {TABLE} --out features",
    f"encode other/tokens {TABLE} --out other/features",
    f"build --source t=episodes.jsonl --tokenizer bpe --workers 1 {TABLE} --out built",
    "targets import dump --target-model m --layers 1,11,21 --max-shard-bytes 600 --out targets",
    "targets import dump --target-model m --layers 1,11,21 --codec fp8 --out targets-fp8",
    "targets import dump --target-model m --layers 1,11,21 --last-hidden-norm pre --out targets-pre",
    "targets import other-dump --target-model m --layers 1,11,21 --out other/targets",
    f"in2 build --arm c {ARM} --raw-shards 2 --min-distance 8 --out arm",
    "in2 probes --length 300 --filler ids.bin --vocab 500 --alphabet 300 --key-len 2 --val-len 3 --out probes",
    "trunk build --model draft --source a=rows.jsonl --window 24 --topk 8 --tokens 600 --chain 2 --last-hidden-norm pre "
    "--device cpu --out trunk",
    *(
        f"export {bank} --to {name} --out export-{name}"
        for bank, names in (
            ("targets", "deepspec specforge-eagle3 specforge-dflash specforge-dspark modelopt"),
            ("targets-pre", "speculators"),
            ("arm", "raw llmc nanogpt-npy megatron nanotron"),
            ("features", "npy parquet"),
        )
        for name in names.split()
    ),
    "push features file://{world}/pushed",
    "merge features other/features --out merged",
    "select targets --limit 3 --out selected",
]


class World:
    """A folder of inputs, `world/`, a folder for runs beside it, and how each command's result looks."""

    def __init__(self, scratch: Path) -> None:
        self.folder = empty(scratch / "world")
        self.run = empty(scratch / "run")
        self.scratch = scratch
        self.output = scratch / "output"
        self.moments = scratch / "moments"
        # in an interpreter of its own: this process may have used threads that a fork of it would wait for
        command = [sys.executable, "-m", "tests.soak.world", str(self.folder)]
        made = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(f"the inputs cannot be made (exit code {made.returncode}):\n{made.stdout}{made.stderr}")
        self.before = self.stamps()

    def start(self, command: Command, *, die_at: int | None = None, most_bytes: int = 0) -> Child:
        """The command in a process of its own, writing to `run`. `die_at`: its publish step that it dies at (see tests/kill.py);
        0: none, but their number goes to the file `moments`. `most_bytes`: how large a file may become; 0: as large as it likes."""

        def run() -> int:
            if most_bytes:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
            if die_at is None:
                return command.run(self.run)
            counted = count_moments(die_at)
            code = command.run(self.run)
            self.moments.write_text(str(counted[0]))
            return code

        return Child(run, self.folder, self.output)

    def stamps(self) -> dict[str, tuple[int, int, int]]:
        """Name → inode, size and time of change of every input: nothing may touch them."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            status = path.stat()
            if path.is_file() and not path.name.endswith(".lock") and "__pycache__" not in path.parts:
                found[path.relative_to(self.folder).as_posix()] = (status.st_ino, status.st_size, status.st_mtime_ns)
        return found


def _scan_with_processes(out: Path) -> int:
    from arrowbank import RunOptions, ScanConfig, scan

    config = ScanConfig(sources=(("t", "episodes.jsonl"), ("e", "more.jsonl")))
    return _exit_code(lambda: scan(config, out, options=RunOptions(workers=2)))


def _build_in2_with_processes(out: Path) -> int:
    from arrowbank import RunOptions, build_in2
    from tests import arms

    return _exit_code(lambda: build_in2(arms.small(), ["filler.bin"], out, options=RunOptions(workers=2)))


def _exit_code(run: Callable[[], object]) -> int:
    from arrowbank.errors import ArrowbankError

    try:
        run()
    except ArrowbankError as error:
        print(error)
        return error.exit_code
    return 0


def make_inputs(here: Path) -> int:
    """The world's inputs, in the folder `here`, which is the current one."""
    from tests import arms, drafts, target_banks, tiny

    texts = tiny.texts(60)
    for name, some in (("episodes", texts[:40]), ("more", texts[30:])):
        lines = ({"query": text, "candidates": [{"text": f"{text}?"}, {"text": f"{text}!"}]} for text in some)
        (here / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chats = tiny.conversations(16)
    (here / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    rows = [[2 + (7 * row + 3 * at) % 90 for at in range(5 + row % 20)] for row in range(60)]
    (here / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    tiny.save_bpe_tokenizer(here / "bpe")
    tiny.save_qwen3(here / "qwen3", chat_template=tiny.TAGGED_TEMPLATE)
    made = drafts.make("llama, canonical", here / "draft")
    assert made.folder == here / "draft"
    arms.save_filler(here / "filler.bin")
    arms.save_filler(here / "ids.bin", vocab=500)  # that the tiny model has
    target_banks.make_dump(here / "dump", lengths=(5, 1, 9, 3, 6))
    target_banks.make_dump(here / "other-dump", lengths=(4, 7), names=("x.safetensors", "y.safetensors"), seed=1)
    for line in PREPARE:
        if code := command_line(line.format(world=here).split()):
            print(line)
            return code
    return 0


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.exit(make_inputs(Path.cwd()))
