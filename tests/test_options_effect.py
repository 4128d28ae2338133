"""Options that the chosen input or mode never reads are errors; input that is ignored is said; accepted command lines stay accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from arrowbank import (
    EncodeConfig,
    ExportConfig,
    HealConfig,
    ImportConfig,
    ModelConfig,
    RunOptions,
    ScanConfig,
    TokenizeConfig,
    TrunkConfig,
    TrunkData,
    audit,
    capture,
    encode,
    export,
    import_targets,
    open_bank,
    push,
    scan,
    tokenize,
    verify_in2,
    write_report,
)
from arrowbank.cli import main
from arrowbank.errors import InputError
from arrowbank.features.audit import AuditConfig
from arrowbank.formats.dump import LossMask
from arrowbank.mtp.trunk_build import estimate_trunk
from arrowbank.report import ReportConfig
from arrowbank.share.push import PushConfig
from arrowbank.targets.capture import CaptureConfig
from arrowbank.targets.check_model import verify_targets
from tests.arms import save_filler, small
from tests.dumps import make_dump
from tests.tiny import save_qwen3, save_texts_bank, save_wordpiece_tokenizer, texts

TABLE = "tests.banks:TableEncoder"
MODEL = ModelConfig(model="m")


class Said:
    """The messages of a command, and no bars."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def phase(self, name: str, total: int | None, *, unit: str = "texts", texts: int | None = None) -> Any:
        from arrowbank.progress import SILENT

        return SILENT.phase(name, total)

    def message(self, text: str) -> None:
        self.messages.append(text)

    @property
    def unread(self) -> list[str]:
        return [message for message in self.messages if ": not read: " in message]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an input of each kind."""
    folder = tmp_path_factory.mktemp("inputs")
    make_dump(folder / "dump")
    import_targets(
        ImportConfig(target_model="m", target_layer_ids=(0, 1, 2), last_hidden_norm="pre"), folder / "dump", folder / "pre"
    )
    import_targets(ImportConfig(target_model="m", target_layer_ids=(0, 1, 2)), folder / "dump", folder / "targets")
    export(ExportConfig(format="deepspec"), folder / "targets", folder / "cache")
    export(ExportConfig(format="speculators"), folder / "pre", folder / "speculators")
    rows = [{"query": text, "candidates": []} for text in texts(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.table({"query": texts(20)}), folder / "train.parquet")
    save_wordpiece_tokenizer(folder / "tokenizer")
    scan(ScanConfig(sources=(("train", folder / "train.jsonl"),)), folder / "texts")
    tokenize(TokenizeConfig(tokenizer=folder / "tokenizer"), folder / "texts", folder / "tokens")
    encode(EncodeConfig(encoder=TABLE), folder / "tokens", folder / "features")
    ids = [[(7 * row + at) % 50 for at in range(40)] for row in range(30)]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    (folder / "lines.txt").write_text("".join(f"line {row} of some words\n" for row in range(200)))
    save_qwen3(folder / "model")
    save_filler(folder / "filler.bin")
    return folder


SPECULATORS = "targets import speculators --target-model m --out out"
CACHE = "targets import cache --out out"
HEAL = "heal --trunk trunk --model model --out out --epochs 0"
ENCODER = f"--encoder {TABLE}"
TRUNK = "trunk build --model model --window 20 --topk 4 --out out"
REFUSED: list[tuple[str, str, str]] = [  # a command line, the option, and words for the mode that never reads it
    *((SPECULATORS, f"--loss-mask {rule}", "a speculators folder") for rule in ("auto", "all_ones", "from_dump")),
    *((SPECULATORS, option, "a speculators folder") for option in ("--masks train.jsonl", "--engine-layers 1,2")),
    (SPECULATORS, "--allow-outside", "a speculators folder"),
    (f"{SPECULATORS} --dry-run", "--loss-mask all_ones", "a speculators folder"),
    *((CACHE, option, "a DeepSpec cache") for option in ("--loss-mask auto", "--on-bad-sample quarantine", "--allow-outside")),
    (f"{CACHE} --to deepspec", "--loss-mask from_dump", "a DeepSpec cache"),
    *(
        (HEAL, option, "--epochs 0")
        for option in (
            "--lr 2e-5",
            "--patience 6",
            "--eval-every 25",
            "--refresh 150",
            "--hard 0",
            "--hard 0.1",
            "--train-projection",
        )
    ),
    *(
        (f"{verb} {ENCODER}", option, "no --model")
        for verb in (
            "encode tokens --out out",
            "estimate tokens",
            "build --source train=train.jsonl --tokenizer tokenizer --out out",
        )
        for option in ("--pooling auto", "--layer -1", "--backbone inner", "--dtype auto", "--load-in-4bit", "--device cpu")
    ),
    (f"encode tokens --out out {ENCODER}", "--gpu-memory-gb 4", "no --model"),
    (f"encode tokens --out out {ENCODER}", "--trust-remote-code", "no --model"),
    ("encode tokens --out out --model model --device cpu", "--gpu-memory-gb 4", "--device cpu"),
    (f"encode tokens --out out {ENCODER}", "--drift-sample 64", "no --onto"),
    (f"encode tokens --out out {ENCODER}", "--min-cosine 0.999", "no --onto"),
    (f"encode tokens --out out {ENCODER} --onto features --drift-sample 0", "--min-cosine 0.9", "--drift-sample 0"),
    (f"encode tokens --out out {ENCODER}", "--ray-address auto", "--engine local"),
    ("build --source train=train.jsonl --model model --out out", "--drift-sample 3", "no --onto"),
    *(("estimate dump", option, "an engine's dump") for option in ("--model model", "--max-batch 3", "--texts t", "--no-time")),
    *(("scan --source train=train.parquet --out out", f"--on-bad-line {how}", "tables") for how in ("error", "skip")),
    ("audit features --source a=train.parquet --source b=train.parquet", "--on-bad-line skip", "tables"),
    ("audit features features", "--on-bad-line error", "no --source"),
    ("audit features features", "--field query=query", "no --source"),
    (f"search features {ENCODER} ducks", "--device cpu", "an encoder of your own"),
    (f"search features {ENCODER} ducks", "--gpu-memory-gb 3", "an encoder of your own"),
    *(("targets verify targets", option, "no --model") for option in ("--samples 4", "--dtype auto", "--device cpu")),
    *(("targets verify cache", option, "no --model") for option in ("--load-in-4bit", "--trust-remote-code", "--samples 0")),
    ("report texts --out page.html", "--neighbours 8", "a page without a feature bank"),
    ("report targets --out page.html", "--points 2000", "a page without a feature bank"),
    ("report features --points 0 --out page.html", "--neighbours 8", "--points 0"),
    *(
        (f"export targets --to {format} --out out", "--stride T", f"--to {format}")
        for format in ("deepspec", "modelopt", "parquet")
    ),
    *(
        (f"export features --to {format} --out out", "--last-hidden-norm post", f"--to {format}")
        for format in ("npy", "parquet", "raw")
    ),
    *(
        (f"export targets --to {format} --out out", "--max-shard-bytes 99", f"--to {format}")
        for format in ("speculators", "specforge-eagle3", "raw", "npy")
    ),
    (
        "in2 build --arm c --length 600 --vocab 1000 --triples 4 --examples 4 --filler filler.bin --out out",
        "--tokenizer tokenizer",
        "token ids",
    ),
    ("in2 probes --length 600 --vocab 1000 --filler filler.bin --out out", "--tokenizer tokenizer", "token ids"),
    ("in2 build --arm c --length 600 --examples 4 --filler filler.bin --out out --no-mirror", "--raw-shards 1", "--no-mirror"),
    (
        "targets capture --model model --layers 0 --source ids.jsonl --out out --device cpu",
        "--tokenizer tokenizer",
        "token rows",
    ),
    (f"{TRUNK} --source a=ids.jsonl@400 --hold-all", "--tokens 400", "@TOKENS"),
    (f"{TRUNK} --source a=ids.jsonl --hold-all --device cpu", "--tokenizer tokenizer", "data of token ids"),
    (f"{TRUNK} --source a=lines.txt --hold-all --device cpu", "--text-field text", "data without named fields"),
]


@pytest.mark.parametrize(("command", "option", "mode"), REFUSED, ids=lambda value: value.replace(" ", "_")[-60:])
def test_an_option_that_is_never_read_is_refused_with_its_mode(
    command: str, option: str, mode: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    assert main([*command.split(), *option.split()]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    name = option.split()[0]
    assert said.startswith(f"arrowbank: {name}")
    assert said.endswith(f": leave {name} out.")
    assert "has no effect with " in said
    assert mode in said
    assert not any((place / made).exists() for made in ("out", "page.html"))


ACCEPTED = [
    "targets import speculators --target-model m --layers 0,1,2 --hidden-size 8 --on-nonfinite drop --codec fp8 --out out",
    "targets import cache --layers 0,1,2 --hidden-size 8 --last-hidden-norm post --limit 2 --out out",
    "targets import dump --target-model m --layers 0,1,2 --on-nonfinite drop --on-bad-sample quarantine --out out",
    "targets import dump --target-model m --dry-run --restart --out out",
    "in2 build --arm a --length 600 --vocab 1000 --examples 4 --triples 4 --decoys 2 --min-distance 10 --filler filler.bin --out out",
    "in2 build --arm c --length 600 --vocab 1000 --triples 4 --examples 5 --raw-shards 4 --filler filler.bin --out out",
    f"encode tokens {ENCODER} --workers 1 --worker 0/1 --out out",
    f"encode tokens {ENCODER} --onto features --drift-sample 0 --out out",
    "scan --source train=train.jsonl --source more=train.parquet --on-bad-line skip --strict --out out",
    "estimate dump --out out",
    "verify tokens --quick",
]


@pytest.mark.parametrize("command", ACCEPTED)
def test_options_that_are_read_or_shared_or_found_nothing_to_do_are_accepted(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    try:
        assert main(command.split()) == 0
    finally:
        shutil.rmtree(place / "out", ignore_errors=True)


TRUNK_CONFIG: dict[str, Any] = {"window": 20, "topk": 4, "hold_all": True}
PYTHON: dict[str, Callable[[Path, Path], object]] = {
    "--allow-outside (allow_outside)": lambda place, out: import_targets(
        ImportConfig(target_model="m", allow_outside=True), place / "speculators", out
    ),
    "--on-bad-sample (on_bad_sample)": lambda place, out: import_targets(
        ImportConfig(on_bad_sample="error"), place / "cache", out
    ),
    "--loss-mask (loss_mask)": lambda place, out: import_targets(ImportConfig(loss_mask="auto"), place / "cache", out),
    "--lr": lambda place, out: HealConfig(model=MODEL, epochs=0, lr=2e-5),
    "--train-projection (train_projection)": lambda place, out: HealConfig(model=MODEL, epochs=0, train_projection=True),
    "--on-bad-line (on_bad_line)": lambda place, out: scan(
        ScanConfig(sources=(("a", place / "train.parquet"),), on_bad_line="error"), out
    ),
    "--drift-sample (drift_sample)": lambda place, out: encode(
        EncodeConfig(encoder=TABLE, drift_sample=64), place / "tokens", out
    ),
    "--ray-address (ray_address)": lambda place, out: RunOptions(ray_address="auto"),
    "--samples": lambda place, out: verify_targets(place / "targets", samples=4),
    "--points": lambda place, out: write_report(ReportConfig(points=2000), [place / "texts"], out.with_suffix(".html")),
    "--tokens": lambda place, out: TrunkConfig(model=MODEL, sources=(TrunkData("a", "b", 100),), tokens=100),
    "--text-field (text_field)": lambda place, out: estimate_trunk(
        TrunkConfig(
            model=ModelConfig(model=place / "model", device="cpu"),
            sources=(TrunkData("a", place / "lines.txt"),),
            text_field="text",
            **TRUNK_CONFIG,
        ),
        out,
    ),
    "--tokenizer": lambda place, out: capture(
        CaptureConfig(
            model=ModelConfig(model=place / "model", device="cpu"),
            data=place / "ids.jsonl",
            target_layer_ids=(0,),
            tokenizer=place / "tokenizer",
        ),
        out,
    ),
    "--no-read-back (read_back)": lambda place, out: push(place / "texts", "org/name", PushConfig(read_back=False)),
    "--gpu-memory-gb (gpu_memory_gb)": lambda place, out: ModelConfig(model="m", device="cpu", gpu_memory_gb=4),
    "--stride": lambda place, out: ExportConfig(format="deepspec", stride="T"),
}


@pytest.mark.parametrize("option", PYTHON)
def test_the_same_holds_in_python_where_a_field_was_given(option: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        PYTHON[option](place, tmp_path / "out")
    assert str(error.value).startswith(f"{option}: has no effect with ")
    assert not list(tmp_path.iterdir())


# loss masks


def masks_of(folder: Path) -> list[list[int]]:
    return [mask for batch in open_bank(folder).shards() for mask in batch.column("loss_mask").to_pylist()]


def without_mask(*rows: int) -> Callable[[int, Any], Any]:
    return lambda row, tensors: {name: tensors[name] for name in tensors if name != "loss_mask" or row not in rows}


MASKS = {"all have one": (), "none has one": (0, 1, 2, 3), "the first lacks it": (0,), "the last lacks it": (3,)}


@pytest.mark.parametrize("which", MASKS)
def test_auto_takes_the_dumps_masks_where_every_sample_has_one(which: str, tmp_path: Path) -> None:
    make_dump(tmp_path / "dump", change=without_mask(*MASKS[which]))
    rule: LossMask = "ones_except_first" if MASKS[which] else "from_dump"
    said = Said()
    found = import_targets(
        ImportConfig(target_model="m", loss_mask="auto" if MASKS[which] == (0,) else None),
        tmp_path / "dump",
        tmp_path / "auto",
        progress=said,
    )
    explicit = import_targets(ImportConfig(target_model="m", loss_mask=rule), tmp_path / "dump", tmp_path / "explicit")
    assert found["loss_mask"] == rule
    assert found == explicit, "the same bank, with the same plan"
    assert masks_of(tmp_path / "auto") == masks_of(tmp_path / "explicit")
    assert sum(f"(--loss-mask {rule})" in message for message in said.messages) == 1
    again = import_targets(ImportConfig(target_model="m"), tmp_path / "dump", tmp_path / "explicit")
    assert again == explicit, "a build that was begun under one name goes on under the other"


def test_only_good_samples_and_those_that_are_taken_decide(tmp_path: Path) -> None:
    def change(row: int, tensors: Any) -> Any:
        if row == 1:  # no good sample, and without a mask
            return {"input_ids": tensors["input_ids"], "target_hidden_states": tensors["target_hidden_states"]}
        return without_mask(3)(row, tensors)

    make_dump(tmp_path / "dump", change=change)
    config = ImportConfig(target_model="m", on_bad_sample="quarantine", limit=2)
    assert import_targets(config, tmp_path / "dump", tmp_path / "bank")["loss_mask"] == "from_dump"
    whole = ImportConfig(target_model="m", on_bad_sample="quarantine")
    assert import_targets(whole, tmp_path / "dump", tmp_path / "all")["loss_mask"] == "ones_except_first"


def test_a_mask_that_is_none_is_an_error_under_auto_too(tmp_path: Path) -> None:
    make_dump(tmp_path / "dump", change=lambda row, tensors: tensors | ({"loss_mask": torch.ones(2)} if row == 2 else {}))
    with pytest.raises(InputError, match=r"line 3: .*tensor loss_mask"):
        import_targets(ImportConfig(target_model="m"), tmp_path / "dump", tmp_path / "bank")


# what is ignored


def test_what_a_dump_holds_beside_is_named_once(tmp_path: Path) -> None:
    def change(row: int, tensors: Any) -> Any:
        return tensors | {"attention_mask": torch.ones(len(tensors["input_ids"])), "ids": tensors["input_ids"].clone()}

    make_dump(tmp_path / "dump", change=change, lines=lambda row, name: {"file": name, "prompt": "x", "path": name})
    (tmp_path / "dump" / "masks.json").write_text("{}")
    said = Said()
    import_targets(ImportConfig(target_model="m", loss_mask="all_ones"), tmp_path / "dump", tmp_path / "bank", progress=said)
    (message,) = said.unread
    assert message == (
        f"{tmp_path / 'dump'}: not read: tensors attention_mask, ids, loss_mask; fields of index.jsonl prompt, path; "
        "files masks.json"
    )


def test_what_a_speculators_folder_holds_beside_is_named(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "speculators", tmp_path / "folder")
    (tmp_path / "folder" / "weights.npy").write_bytes(b"")
    said = Said()
    import_targets(ImportConfig(target_model="m"), tmp_path / "folder", tmp_path / "bank", progress=said)
    assert said.unread == [f"{tmp_path / 'folder'}: not read: files weights.npy"]


def test_what_a_folder_of_sources_holds_beside_is_named(tmp_path: Path) -> None:
    source = tmp_path / "episodes"
    source.mkdir()
    (source / "a.jsonl").write_text('{"query": "a"}\n')
    for name in ("notes.txt", "b.rst", "more.json"):
        (source / name).write_text("x")
    (source / "deeper").mkdir()
    (source / ".hidden").write_text("x")
    said = Said()
    scan(ScanConfig(sources=(("train", source),)), tmp_path / "texts", progress=said)
    assert said.unread == [f"{source}: not read: files b.rst, deeper, more.json, notes.txt"]


def captured(place: Path, data: Path, out: Path, said: Said) -> None:
    config = CaptureConfig(
        model=ModelConfig(model=place / "model", device="cpu"), data=data, target_layer_ids=(0,), min_loss_tokens=1
    )
    capture(config, out, progress=said)


def test_fields_of_samples_that_a_capture_does_not_read_are_named(place: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "note": None}, {"input_ids": [4, 5], "attention_mask": [1, 1]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = Said()
    captured(place, tmp_path / "rows.jsonl", tmp_path / "lines", said)
    assert said.unread == [f"{tmp_path / 'rows.jsonl'}: not read: fields labels, attention_mask"]
    datasets.Dataset.from_list([{"input_ids": [1, 2], "weight": 0.5}]).save_to_disk(str(tmp_path / "saved"))
    said = Said()
    captured(place, tmp_path / "saved", tmp_path / "columns", said)
    assert said.unread == [f"{tmp_path / 'saved'}: not read: fields weight"]
    said = Said()
    captured(place, place / "tokens", tmp_path / "bank", said)
    assert said.unread == []


def test_fields_that_a_trunk_does_not_read_are_named(place: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": [(row + at) % 40 for at in range(30)], "text": "x", "loss_mask": [1]} for row in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from arrowbank.mtp.trunk_build import TrunkStage

    config = TrunkConfig(
        model=ModelConfig(model=place / "model", device="cpu"),
        sources=(TrunkData("a", tmp_path / "rows.jsonl"),),
        **TRUNK_CONFIG,
    )
    plan, said = TrunkStage(config), Said()
    assert len(plan.windows) > 0
    plan.tell_unread(said)
    assert said.unread == [f"a ({tmp_path / 'rows.jsonl'}): not read: fields text, loss_mask"]


def test_files_that_go_by_a_fillers_name_are_named(tmp_path: Path) -> None:
    from arrowbank import build_in2

    filler = save_filler(tmp_path / "train_0.bin")
    other = save_filler(tmp_path / "train_00.bin", seed=2)
    for name in ("train_0.json", "train_0.bin.idx", "train_0_mask.npy"):
        (tmp_path / name).write_bytes(b"x")
    said = Said()
    build_in2(small(), [filler, other], tmp_path / "arm", progress=said)
    beside = ", ".join(str(tmp_path / name) for name in ("train_0.bin.idx", "train_0.json", "train_0_mask.npy"))
    assert said.unread == [f"--filler: not read: files {beside}"]


# accepted command lines of the earlier tools


@pytest.mark.parametrize(("shards", "files"), [(5, 4), (7, 7), (20, 7), (1, 1)])
def test_fewer_examples_than_fill_the_shards_write_fewer_files(shards: int, files: int, tmp_path: Path) -> None:
    from arrowbank import build_in2

    filler, said = save_filler(tmp_path / "filler.bin"), Said()
    build_in2(small(raw_shards=shards, examples=7), [filler], tmp_path / "arm", progress=said)
    written = sorted(path.name for path in (tmp_path / "arm").glob("*.bin"))
    assert written == [f"in2c_train_{index:05d}.bin" for index in range(files)]
    assert any(f"only {files} files are written" in message for message in said.messages) == (files < shards)
    assert all(check.ok for check in verify_in2([tmp_path / "arm"]))
    build_in2(small(raw_shards=files, examples=7), [filler], tmp_path / "exact")
    for name in written:
        assert (tmp_path / "arm" / name).read_bytes() == (tmp_path / "exact" / name).read_bytes()


CONSTANTS = ("NaN", "Infinity", "-Infinity")


@pytest.mark.parametrize("constant", CONSTANTS)
@pytest.mark.parametrize("slow", [False, True], ids=["the fast reader's line", "the plain reader's line"])
def test_a_line_with_a_constant_of_python_in_a_field_that_is_not_read_is_read(
    constant: str, slow: bool, tmp_path: Path
) -> None:
    extra = ', "candidates": [{"text": 3}]' if slow else ""  # no text there: only the plain reader counts it
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"query": "first", "score": {constant}{extra}}}\n{{"query": "second", "deep": [{{"x": {constant}}}]}}\n')
    manifest = scan(ScanConfig(sources=(("train", path),)), tmp_path / "texts")
    assert open_bank(tmp_path / "texts").dataset["text"][:] == ["first", "second"]
    assert manifest["counts"]["episodes"] == 2


@pytest.mark.parametrize("constant", CONSTANTS)
def test_in_a_field_that_is_read_it_is_a_number_in_place_of_a_text(constant: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"query": {constant}}}\n{{"query": "second"}}\n')
    assert scan(ScanConfig(sources=(("train", path),)), tmp_path / "texts")["counts"]["not_text"] == 1
    with pytest.raises(InputError, match=r"line 1: a number, bool, list or object at query"):
        scan(ScanConfig(sources=(("train", path),), strict=True), tmp_path / "strict")


@pytest.mark.parametrize("constant", CONSTANTS)
def test_the_other_readers_of_lines_read_them_too(constant: str, place: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"input_ids": [1, 2, 3], "score": {constant}}}\n')
    captured(place, tmp_path / "rows.jsonl", tmp_path / "captured", Said())
    lines = "".join(f'{{"input_ids": {[at % 40 for at in range(30)]}, "score": {constant}}}\n' for _ in range(20))
    (tmp_path / "trunk.jsonl").write_text(lines)
    data = (TrunkData("a", tmp_path / "trunk.jsonl"),)
    config = TrunkConfig(model=ModelConfig(model=place / "model", device="cpu"), sources=data, **TRUNK_CONFIG)
    assert estimate_trunk(config, tmp_path / "trunk").rows > 0
    make_dump(tmp_path / "dump", lines=lambda row, name: f'{{"file": "{name}", "score": {constant}}}')
    assert import_targets(ImportConfig(target_model="m"), tmp_path / "dump", tmp_path / "bank")["rows"] == 4
    sources = tuple((name, tmp_path / f"{name}.jsonl") for name in ("train", "eval"))
    words = texts(20)[3]
    for _, path in sources:
        path.write_text(f'{{"query": {json.dumps(words)}, "score": {constant}}}\n')
    assert audit(AuditConfig(scan=ScanConfig(sources=sources)), place / "features").exact == 1


def test_what_is_not_json_is_refused_as_before(tmp_path: Path) -> None:
    for bad in ("nan", "NAN", "infinity", "+Infinity", "-NaN", "1e", "0x1"):
        (tmp_path / "a.jsonl").write_text(f'{{"query": "a", "score": {bad}}}\n')
        with pytest.raises(InputError, match=r"line 1, column .*: not JSON"):
            scan(ScanConfig(sources=(("train", tmp_path / "a.jsonl"),)), tmp_path / "texts")


def test_a_texts_bank_as_filler_needs_its_tokenizer(place: Path, tmp_path: Path) -> None:
    from arrowbank import build_in2

    bank = save_texts_bank(tmp_path / "texts", texts(200))
    config = small(vocab=1000, tokenizer=str(place / "tokenizer"), length=300, triples=2, examples=2)
    assert build_in2(config, [bank, save_filler(tmp_path / "f.bin")], tmp_path / "arm")["examples"] == 2
