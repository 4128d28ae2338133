"""Mutated inputs: sources, dumps, caches, fillers, conversations, models, banks, options and addresses.

Every command must end in 0, 1 or 2, without a traceback, a signal or a hang, leave its inputs as they are, and write nothing but
its `--out`.
"""

from __future__ import annotations

import functools
import gzip
import io
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.soak.children import Ended, Trial, command_line, empty, run_many, said, wrong_with
from tests.soak.mutate import NUMBERS, STRINGS, TOKENS, edit_bytes, edit_json
from tests.soak.tally import Try
from tests.soak.world import World

INPUTS = 150  # per round: one kind, in one child
MOST_BYTES = 4 << 20  # of an input

Make = Callable[[random.Random, Path, Path], str]
"""(generator, the world's folder, an empty folder) → the command line; mutated inputs go to that folder, results to out/ in it."""

KINDS: dict[str, tuple[Make, float]] = {}


def kind(name: str, weight: float = 1.0) -> Callable[[Make], Make]:
    """Register a kind of input and how often it is drawn."""

    def register(make: Make) -> Make:
        KINDS[name] = (make, weight)
        return make

    return register


def attack(world: World, rng: random.Random) -> Iterator[Try]:
    """INPUTS inputs of one kind."""
    name = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    seed = rng.getrandbits(64)
    here = empty(world.scratch / "inputs")
    for label, wrong, detail in run_many(INPUTS, partial(_trial, name, world.folder, here, seed), world.scratch, world.folder):
        yield Try("inputs", label, wrong, detail)
    if world.stamps() != world.before:
        changed = set(world.stamps().items()) ^ set(world.before.items())
        yield Try("inputs", name, "an input was changed", str(sorted(changed))[:2000])
        world.before = world.stamps()


def _trial(name: str, world: Path, here: Path, seed: int, number: int) -> Trial:
    make, _ = KINDS[name]
    rng = random.Random(f"{seed}/{number}")
    empty(here)
    argv = make(rng, world, here).split("\t")
    before = _contents(here)

    def trial() -> tuple[str, str]:
        code = command_line([*argv, *(["--json"] if rng.random() < 0.1 else [])])
        text = said()
        wrong = wrong_with(Ended(code, text))
        after = _contents(here)
        if not wrong and (touched := sorted(path for path in before if after.get(path) != before[path])):
            wrong = f"an input was changed: {touched}"
        if not wrong and (stray := sorted(path for path in after if path not in before)):
            wrong = f"written outside --out: {stray}"
        return wrong, f"{argv}\n{_shown(before)}\n{text}"

    return name, trial


def _contents(here: Path) -> dict[str, bytes]:
    """What is in the folder, but for what the command writes: names that begin with "out", and locks."""
    found = {}
    for path in here.rglob("*"):
        name = path.relative_to(here).as_posix()
        if path.is_file() and not name.startswith("out") and not name.endswith(".lock"):
            found[name] = path.read_bytes()
    return found


def _shown(files: dict[str, bytes]) -> str:
    return "\n".join(f"{name}: {data[:400]!r}" for name, data in files.items() if len(data) < 5000)[:2500]


def line(*said: object) -> str:
    """A command line of these words, with tabs between them."""
    return "\t".join(str(word) for word in said)


def words(text: str) -> list[str]:
    return text.split()


@functools.cache
def read(path: Path) -> bytes:
    return path.read_bytes()


@functools.cache
def parsed(path: Path) -> Any:
    return json.loads(path.read_bytes())


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[:MOST_BYTES])
    return path


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def clone(source: Path, target: Path) -> Path:
    """The same files under other names, by hard links: what is mutated is a file of its own."""
    return Path(shutil.copytree(source, target, copy_function=_link))


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def mutate_file(rng: random.Random, path: Path) -> None:
    """Another file of the same name: JSON edited as JSON or as text, anything else as bytes."""
    data = path.read_bytes()
    path.unlink()
    if path.suffix == ".json" and rng.random() < 0.7:
        path.write_bytes(as_json(edit_json(rng, json.loads(data), rng.choice((1, 1, 2, 5))))[:MOST_BYTES])
    elif path.suffix == ".safetensors" and rng.random() < 0.7:
        path.write_bytes(edit_header(rng, data)[:MOST_BYTES])
    elif path.suffix == ".jsonl" and rng.random() < 0.7:
        path.write_bytes(edit_lines(rng, data)[:MOST_BYTES])
    elif rng.random() > 0.03:
        path.write_bytes(edit_bytes(rng, data)[:MOST_BYTES])


def edit_lines(rng: random.Random, data: bytes) -> bytes:
    """Lines of JSON with some of them edited as JSON, as text, or both."""
    lines = data.splitlines()[: rng.randint(1, 12)]
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        try:
            lines[at] = as_json(edit_json(rng, json.loads(lines[at])))
        except (ValueError, RecursionError):  # it has been edited before
            lines[at] = edit_bytes(rng, lines[at])
    text = b"\n".join(lines) + rng.choice((b"\n", b"\n", b"", b"\r\n", b"\n\n"))
    return edit_bytes(rng, text) if rng.random() < 0.4 else text


def edit_header(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with its header edited as JSON, with a length that fits it or not."""
    size = int.from_bytes(data[:8], "little")
    header = as_json(edit_json(rng, json.loads(data[8 : 8 + size]), rng.choice((1, 1, 3))))
    length = len(header) if rng.random() < 0.9 else rng.choice((0, len(header) + 1, 2**63, 2**32, len(header) - 1))
    return struct.pack("<Q", length % 2**64) + header + data[8 + size :]


def packed(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """A file's ending and its bytes: plain or compressed, sometimes damaged after it was."""
    import zstandard

    way = rng.randrange(4)
    ending, made = ("", data)
    if way == 1:
        ending, made = ".gz", gzip.compress(data, 1)
    elif way == 2:
        ending, made = ".zst", zstandard.compress(data)
    if ending and rng.random() < 0.5:
        made = edit_bytes(rng, made)
    return ending, made


@kind("episodes in JSON lines", 6)
def _episodes(rng: random.Random, world: Path, here: Path) -> str:
    ending, data = packed(rng, edit_lines(rng, read(world / "episodes.jsonl")))
    source = put(here / f"in.jsonl{ending}", data)
    options = rng.choice(([], [], ["--on-bad-line", "skip"], ["--strict"], ["--field", "query=candidates[].text"]))
    return line("scan", "--source", f"t={source}", "--out", here / "out", *options)


@kind("Parquet and Arrow sources", 2)
def _tables(rng: random.Random, world: Path, here: Path) -> str:
    ending = rng.choice((".parquet", ".arrow"))
    source = put(here / f"in{ending}", edit_bytes(rng, _table(ending, world)))
    return line("scan", "--source", f"t={source}", "--out", here / "out")


@functools.cache
def _table(ending: str, world: Path) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([json.loads(line) for line in read(world / "episodes.jsonl").splitlines()[:20]])
    buffer = io.BytesIO()
    if ending == ".parquet":
        pq.write_table(table, buffer)
    else:
        with pa.ipc.new_stream(buffer, table.schema) as writer:
            writer.write_table(table)
    return buffer.getvalue()


@kind("saved datasets", 1)
def _saved(rng: random.Random, world: Path, here: Path) -> str:
    folder = clone(world / "texts", here / "in")
    mutate_file(rng, rng.choice(sorted(folder.glob("*.json")) + sorted(folder.glob("*.arrow"))))
    return line("scan", "--source", f"t={folder}", "--field", "query=text", "--out", here / "out")


@kind("dumps", 4)
def _dumps(rng: random.Random, world: Path, here: Path) -> str:
    folder = clone(world / "dump", here / "in")
    mutate_file(rng, rng.choice((folder / "index.jsonl", rng.choice(sorted(folder.glob("*.safetensors"))))))
    options = rng.choice(([], [], ["--on-bad-sample", "quarantine"], ["--loss-mask", "from_dump"], ["--to", "deepspec"]))
    options += rng.choice(([], ["--codec", "fp8"], ["--dry-run"])) if options != ["--to", "deepspec"] else []
    said = ["--target-model", "m", "--layers", "1,11,21"]
    return line("targets", "import", folder, *said, "--out", here / "out", *options)


@kind("speculators folders", 2)
def _speculators(rng: random.Random, world: Path, here: Path) -> str:
    return _import_of(rng, world / "export-speculators", here)


@kind("DeepSpec caches", 2)
def _caches(rng: random.Random, world: Path, here: Path) -> str:
    return _import_of(rng, world / "export-deepspec", here)


def _import_of(rng: random.Random, source: Path, here: Path) -> str:
    folder = clone(source, here / "in")
    mutate_file(rng, rng.choice([path for path in sorted(folder.rglob("*")) if path.is_file()]))
    if rng.random() < 0.3:
        return line(*rng.choice((("targets", "verify"), ("verify",), ("info",))), folder)
    return line("targets", "import", folder, "--target-model", "m", "--layers", "1,11,21", "--out", here / "out")


@kind("fillers", 4)
def _fillers(rng: random.Random, world: Path, here: Path) -> str:
    ending = rng.choice((".npy", ".npy", ".bin", ".idx"))
    path = put(here / f"in{ending}", _filler(ending, rng, world))
    if ending == ".idx":
        put(here / "in.bin", read(world / "filler.bin")[: rng.randint(0, 9000)])
        path = rng.choice((path, here / "in.bin"))
    what = rng.choice((("build", "--arm", "c", "--examples", "2", "--min-distance", "8"), ("probes", "--blocks", "1")))
    shape = ["--length", "300", "--vocab", "1000", "--alphabet", "300", "--key-len", "2", "--val-len", "3"]
    shape += ["--triples", "2"] if what[0] == "build" else []
    return line("in2", *what, "--filler", path, *shape, "--out", here / "out")


def _filler(ending: str, rng: random.Random, world: Path) -> bytes:
    import numpy as np

    if ending == ".bin":
        return edit_bytes(rng, read(world / "filler.bin"))
    if ending == ".idx":
        return edit_bytes(rng, read(min((world / "export-megatron").glob("*.idx"))))
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(read(world / "filler.bin"), "<u2"))
    data = buffer.getvalue()
    header, body = data[: data.index(b"\n") + 1], data[data.index(b"\n") + 1 :]
    if rng.random() < 0.5:
        described = rng.choice(
            ("'<u2'", "'|O'", "'<f4'", "'<M8[s]'", "'<U5'", "[('a', '<u2')]", "'<u9'", "None", "'>u2'", "'V0'")
        )
        shape = rng.choice(
            ("(5000,)", "(-1,)", "(0,)", "(50, 100)", "()", "(99999999999999999999,)", "(2500,)", "None", "(1e3,)")
        )
        order = rng.choice(("False", "True", "0", "'x'"))
        text = f"{{'descr': {described}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
        return header[:8] + struct.pack("<H", len(text)) + text + body
    return edit_bytes(rng, header) + body


@kind("conversations", 1)
def _conversations(rng: random.Random, world: Path, here: Path) -> str:
    ending, data = packed(rng, edit_lines(rng, read(world / "chats.jsonl")))
    return _capture(world / "qwen3", put(here / f"in.jsonl{ending}", data), here)


def _capture(model: Path, data: Path, here: Path) -> str:
    return line(
        *words("targets capture --layers 0,1 --device cpu --dry-run --min-loss-tokens 1 --model"),
        model,
        "--source",
        data,
        "--out",
        here / "out",
    )


@kind("chat templates", 0.2)
def _templates(rng: random.Random, world: Path, here: Path) -> str:
    model = clone(world / "qwen3", here / "in")
    path = model / "chat_template.jinja"
    data = path.read_bytes()
    path.unlink()
    pieces = [b"{% for x in messages %}", b"{{ raise_exception('x') }}", b"{% endfor %}", b"{{ messages[9] }}", b"{{ 1/0 }}"]
    pieces += [
        b"{% for i in range(10**9) %}{% endfor %}",
        b"{{ ''.__class__ }}",
        b"{% if %}",
        b"{{ x|nothing }}",
        b"{{ 'x'*10**9 }}",
    ]
    at = rng.randrange(len(data))
    put(path, data[:at] + rng.choice(pieces) + data[at:] if rng.random() < 0.5 else edit_bytes(rng, data))
    return _capture(model, world / "chats.jsonl", here)


@kind("tokenizers", 1)
def _tokenizers(rng: random.Random, world: Path, here: Path) -> str:
    model = clone(world / "bpe", here / "in")
    mutate_file(rng, rng.choice(sorted(model.glob("*.json"))))
    return line("tokenize", world / "other/texts", "--tokenizer", model, "--workers", "1", "--out", here / "out")


@kind("model folders", 2)
def _models(rng: random.Random, world: Path, here: Path) -> str:
    model = clone(world / rng.choice(("qwen3", "draft")), here / "in")
    names = ["config.json", "config.json", "model.safetensors"] + (
        ["tokenizer_config.json"] if (model / "tokenizer.json").exists() else []
    )
    if rng.random() < 0.3:
        index = {
            "metadata": {"total_size": 9},
            "weight_map": {"model.norm.weight": "model.safetensors", "x": rng.choice(STRINGS)},
        }
        put(model / "model.safetensors.index.json", as_json(edit_json(rng, index)))
        if rng.random() < 0.8:
            (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
            names = ["config.json"]
    mutate_file(rng, model / rng.choice(names))
    way = rng.randrange(4)
    if way == 0:
        return line("info", model)
    if way == 1:
        return line("estimate", world / "tokens", "--model", model, "--no-time", "--device", "cpu")
    if way == 2:
        return line(
            *words("trunk build --dry-run --device cpu --window 24 --topk 8 --tokens 600"),
            "--model",
            model,
            "--source",
            f"a={world}/rows.jsonl",
            "--out",
            here / "out",
        )
    return line("encode", world / "tokens", "--model", model, "--limit", "2", "--device", "cpu", "--out", here / "out")


@kind("token rows", 2)
def _rows(rng: random.Random, world: Path, here: Path) -> str:
    ending, data = packed(rng, edit_lines(rng, read(world / "rows.jsonl")))
    source = put(here / f"in.jsonl{ending}", data)
    shape = words("trunk build --dry-run --device cpu --window 24 --topk 8 --tokens 60 --model")
    return line(*shape, world / "draft", "--source", f"a={source}", "--out", here / "out")


LOOKED_AT = {
    "texts": (
        "verify {}",
        "info {}",
        "select {} --limit 3 --out {out}",
        "merge {} {} --out {out}",
        "report {} --out {out}.html",
        "tokenize {} --tokenizer bpe --workers 1 --out {out}",
        "scan --source t=episodes.jsonl --onto {} --out {out}",
        "push {} file://{out}",
        "verify {} --quick",
        "export {} --to parquet --out {out}",
    ),
    "tokens": (
        "verify {}",
        "info {}",
        "select {} --limit 3 --texts texts --out {out}",
        "encode {} --texts texts --encoder tests.banks:TableEncoder --out {out}",
        "estimate {} --encoder tests.banks:TableEncoder --no-time",
        "push {} file://{out}",
    ),
    "features": (
        "verify {}",
        "info {}",
        "report {} --points 5 --neighbours 1 --out {out}.html",
        "lookup {} x",
        "select {} --where kind=query --out {out}",
        "merge {} other/features --out {out}",
        "compare {} features",
        "search {} x",
        "audit {} other/features",
        "export {} --to npy --out {out}",
        "push {} file://{out}",
        "pull file://{} {out}",
    ),
    "targets": (
        "verify {}",
        "targets verify {}",
        "info {}",
        "report {} --out {out}.html",
        "select {} --limit 2 --out {out}",
        "merge {} other/targets --out {out}",
        "export {} --to deepspec --out {out}",
        "export {} --to modelopt --out {out}",
        "targets vocab {} --draft-vocab-size 9 --out {out}",
    ),
    "targets-fp8": (
        "verify {}",
        "targets verify {}",
        "export {} --to specforge-eagle3 --out {out}",
    ),
    "arm": (
        "verify {}",
        "in2 verify {}",
        "info {}",
        "report {} --out {out}.html",
        "export {} --to llmc --out {out}",
        "export {} --to megatron --out {out}",
    ),
    "probes": (
        "verify {}",
        "info {}",
        "report {} --out {out}.html",
    ),
    "trunk": (
        "verify {}",
        "info {}",
        "report {} --out {out}.html",
        "heal --trunk {} --model draft --epochs 0 --device cpu --out {out}",
    ),
    "export-deepspec": (
        "verify {}",
        "info {}",
    ),
    "export-modelopt": (
        "verify {}",
        "info {}",
    ),
    "export-specforge-eagle3": (
        "verify {}",
        "info {}",
    ),
    "export-megatron": (
        "verify {}",
        "info {}",
    ),
    "export-npy": (
        "verify {}",
        "info {}",
    ),
    "export-parquet": (
        "verify {}",
        "info {}",
    ),
}
"""What reads a bank or an export, by its name in the world; `{}` is the mutated copy."""


@kind("manifests and other JSON of banks", 8)
def _manifests(rng: random.Random, world: Path, here: Path) -> str:
    return _bank(rng, world, here, ".json", ".jsonl")


@kind("shards and arrays of banks", 4)
def _shards(rng: random.Random, world: Path, here: Path) -> str:
    return _bank(rng, world, here, ".arrow", ".npy", ".bin", ".idx", ".parquet")


def _bank(rng: random.Random, world: Path, here: Path, *endings: str) -> str:
    names = [name for name in LOOKED_AT if any(path.suffix in endings for path in (world / name).rglob("*"))]
    name = rng.choice(names)
    folder = clone(world / name, here / "in")
    mutate_file(rng, rng.choice([path for path in sorted(folder.rglob("*")) if path.suffix in endings]))
    words = rng.choice(LOOKED_AT[name]).split()
    return line(*(word.format(folder, out=here / "out") for word in words))


@kind("receipts of interrupted builds", 2)
def _receipts(rng: random.Random, world: Path, here: Path) -> str:
    """A committed bank without its commit is what an interrupted build leaves; its journal is what is mutated."""
    bank, command = rng.choice(_RESUMED)
    folder = Path(shutil.copytree(world / bank, here / "out"))  # its log is appended to
    (folder / "state.json").unlink()
    manifest = json.loads(read(folder / "manifest.json"))
    for entry in manifest.get("files", []):
        if rng.random() < 0.8:
            receipt = entry | {"plan_digest": manifest["plan_digest"]}
            data = as_json(edit_json(rng, receipt) if rng.random() < 0.3 else receipt)
            put(folder / "journal" / f"{entry['name']}.json", edit_bytes(rng, data) if rng.random() < 0.1 else data)
    if rng.random() < 0.5:
        mutate_file(rng, folder / "manifest.json")
    return line(*(word.format(out=here / "out") for word in command.split()))


_RESUMED = [
    ("texts", "scan --source t=episodes.jsonl --out {out}"),
    ("tokens", "tokenize texts --tokenizer bpe --workers 1 --out {out}"),
    (
        "features",
        "encode tokens --encoder tests.banks:TableEncoder --shard-rows 12 --max-batch 4 --token-budget 64 --out {out}",
    ),
    ("targets", "targets import dump --target-model m --layers 1,11,21 --max-shard-bytes 600 --out {out}"),
    ("features", "verify {out}"),
    ("features", "info {out}"),
]

OPTIONS = words(
    "--out --source --onto --field --strict --on-bad-line --restart --tokenizer --max-tokens --special-tokens --on-long --prompt "
    "--workers --model --encoder --pooling --layer --normalize --dtype --max-batch --token-budget --shard-rows --limit --rows "
    "--shards --worker --where --to --stride --last-hidden-norm --max-shard-bytes --codec --spans --target-model --layers --loss-mask "
    "--on-nonfinite --arm --examples --length --filler --triples --decoys --seed --vocab --source --window --topk --tokens --chain "
    "--last-hidden-norm --epochs --lr --batch --quick --points --audit --min-cosine --threshold --max-shared -k --json -h "
    "--version --nothing --dry-run --budget-gb --texts --draws --confidence --positions --blocks --revision --license"
)
VERBS = [
    "scan",
    "tokenize texts",
    "encode tokens",
    "build",
    "merge texts texts",
    "select features",
    "export features",
    "targets import dump",
    "targets capture",
    "targets verify export-deepspec",
    "targets vocab targets",
    "in2 build",
    "in2 verify arm",
    "in2 probes",
    "in2 score probes",
    "trunk build",
    "heal",
    "push features",
    "pull",
    "report features",
    "info features",
    "verify features",
    "audit features",
    "search features",
    "lookup features",
    "compare features",
    "estimate tokens",
    "demo",
    "nothing",
    " ",
]
VALUES = [
    "0", "-1", "1", "3", "1e9", "nan", "99999999999999999999", "0:5", "5:0", "a:b", "1/3", "3/1", "0,1", "-1,-1", "t=episodes.jsonl",
    "t=", "=", "=x", "query=query", "query=a[", "kind=query", "length<=x", "length<=3", "texts", "tokens", "features", "targets",
    "filler.bin", "dump", "qwen3", "draft", "bpe", "tests.banks:TableEncoder", "tests.banks:nothing", "nothing:x", ":", "npy", "deepspec",
    "llmc", "auto", "cpu", "cuda:9", "meta", "mean", "a", "b", "c", "post", "pre", "T", "fp8", "error", "skip", "m", "", ".", "..",
    "episodes.jsonl", "/dev/null", "/proc/self/mem", "a=rows.jsonl", "a=rows.jsonl@60", "int8=x", "ä\udcff",
]  # fmt: skip


@kind("options and their values", 8)
def _options(rng: random.Random, world: Path, here: Path) -> str:
    """Any options after any verb. What is written goes to out, whatever --out says; the demo would take minutes."""
    verb = rng.choice(VERBS)
    words = verb.split()
    for _ in range(rng.randrange(6)):
        option = rng.choice(OPTIONS)
        value = rng.choice(VALUES) if rng.random() < 0.9 else rng.choice(STRINGS).replace("\t", " ").replace("\0", "")
        if option in ("--out", "--restart"):
            continue
        words += rng.choice(([option], [option, value], [option, value], [f"{option}={value}"], [value]))
    if verb == "demo":
        words.append("--episodes=-1")
    return line(*words, "--out", here / "out")


SCHEMES = (
    "file",
    "memory",
    "s3",
    "hf",
    "http",
    "ftp",
    "gs",
    "az",
    "",
    "x",
    "s3a",
    "FILE",
    "github",
    "zip",
    "local",
    "simplecache",
)
PARTS = (
    "bucket",
    "127.0.0.1:1",
    "me:se@cret@127.0.0.1:1",
    "",
    "..",
    "a b",
    "%2e%2e",
    "[::1",
    "ä",
    "datasets/x/y",
    "x?token=1&X-Amz-Signature=2",
    "#f",
    "::",
)


@kind("addresses", 1)
def _addresses(rng: random.Random, world: Path, here: Path) -> str:
    path = "/".join(rng.choice((*PARTS, str(here)[1:])) for _ in range(rng.randint(1, 3)))
    address = rng.choice(
        (f"{rng.choice(SCHEMES)}://{path}", f"{rng.choice(SCHEMES)}:{path}", path, f"file://{here}/out/{path}")
    )
    if address.startswith(("file", "local", "FILE")):
        address = f"file://{here}/out{rng.choice(('', '/a', '/a b', '?x', '#y', '/%41'))}"
    verb = rng.choice(("pull", "push", "verify", "info", "lookup"))
    if verb == "push":
        return line("push", "texts", address if "://" in address else f"file://{here}/out")
    return line(verb, address, *([here / "out2"] if verb == "pull" else ["x"] if verb == "lookup" else []))


@kind("bytes from nowhere", 1)
def _nothing(rng: random.Random, world: Path, here: Path) -> str:
    """Files of random bytes or tokens where a source, a filler, a dump or a bank is wanted."""
    data = (
        b"".join(rng.choice(TOKENS) for _ in range(rng.randrange(30)))
        if rng.random() < 0.5
        else rng.randbytes(rng.randrange(400))
    )
    name = rng.choice(("in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.parquet", "in.arrow", "in.npy", "in.bin", "in.idx"))
    source = put(here / name, data)
    number = str(rng.choice(NUMBERS))
    return rng.choice(
        (
            line("scan", "--source", f"t={source}", "--out", here / "out"),
            line("info", source),
            line("verify", source),
            line("in2", "probes", "--filler", source, "--length", number, "--out", here / "out"),
            line("trunk", "build", "--model", "draft", "--source", f"a={source}@{number}", "--dry-run", "--out", here / "out"),
        )
    )
