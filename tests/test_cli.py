"""The command line as a person and as a program use it: real banks, exit codes, events, and errors without tracebacks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arrowbank.cli import GROUPS, VERBS, main
from tests.kill import tree_bytes

RUN = "engine ray-address workers worker shards rows dry-run budget-gb restart"
CONTRACT = {
    "scan": "source out field strict on-bad-line max-line-bytes onto workers dry-run budget-gb restart",
    "tokenize": f"tokenizer out max-tokens special-tokens on-long {RUN}",
    "encode": "model out max-batch token-budget pooling layer normalize backbone dtype load-in-4bit gpu-memory-gb device shard-rows "
    f"limit trial no-mirror encoder trust-remote-code onto drift-sample min-cosine {RUN}",
    "build": "source model out field strict on-bad-line max-line-bytes onto "
    "max-tokens special-tokens on-long max-batch token-budget pooling "
    "layer normalize backbone dtype load-in-4bit gpu-memory-gb device shard-rows limit restart no-mirror engine workers "
    "drift-sample min-cosine",
    "merge": "out restart",
    "select": "where rows limit out texts restart",
    "verify": "quick",
    "info": "",
    "report": "out verify points neighbours audit",
    "estimate": "model",
    "compare": "min-cosine",
    "lookup": "",
    "search": "model where tokenizer encoder faiss device gpu-memory-gb trust-remote-code json",
    "audit": "source field on-bad-line max-line-bytes against threshold max-shared out json",
    "export": "to out max-shard-bytes last-hidden-norm stride restart",
    "push": "public license restart no-read-back",
    "pull": "revision",
    "targets import": "out target-model layers hidden-size loss-mask last-hidden-norm on-nonfinite on-bad-sample allow-outside limit "
    "vocab-size max-shard-bytes to codec spans dry-run restart",
    "targets capture": "model source on-bad-line layers out max-length min-loss-tokens max-line-bytes "
    f"last-hidden-norm codec spans target-model {RUN}",
    "targets verify": "model",
    "targets vocab": "draft-vocab",
    "in2 build": "arm length examples filler out triples key-len val-len alphabet decoys min-distance vocab seed split raw-shards "
    f"global-batch unique-keys no-mirror dtype tokenizer {RUN}",
    "in2 verify": "filler unique-keys",
    "in2 score": "model out",
    "in2 probes": f"length filler out positions blocks probe-pos seed key-len val-len alphabet vocab dtype tokenizer {RUN}",
    "trunk build": "model source out window topk tokens chain layers hold-all last-hidden-norm dtype load-in-4bit device gpu-memory-gb "
    f"on-bad-line tokenizer text-field max-line-bytes trust-remote-code {RUN}",
    "heal": "trunk model out chain stride refresh epochs lr batch eval-every patience hard last-hidden-norm recycle codec also dump "
    "draft-from in-order train-projection init dtype device trust-remote-code dry-run budget-gb restart",
}


def every_verb() -> list[str]:
    """The verbs as they are typed."""
    alone = [verb.__name__ for verbs in VERBS.values() for verb in verbs]
    return alone + [f"{group} {name}" for group, (_, members) in GROUPS.items() for name in members]


def write_episodes(folder: Path, count: int = 30) -> Path:
    path = folder / "train.jsonl"
    lines = [
        {"query": f"what is thing {i}?", "candidates": [{"text": f"thing {i} is a shard"}, {"text": "a shard"}]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    folder = tmp_path_factory.mktemp("built")
    source = write_episodes(folder)
    assert main(["build", "--source", f"train={source}", "--model", str(tiny_bert), "--out", str(folder / "bank")]) == 0
    return folder / "bank"


def run(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "arrowbank", *argv], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("verb", every_verb())
def test_every_verb_has_help_with_an_example_and_the_options_of_the_contract(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main([*verb.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Example: arrowbank {verb}" in text
    options = set(re.findall(r"--([a-z0-9][a-z0-9-]+)", text))
    assert set(CONTRACT.get(verb, "").split()) <= options


@pytest.mark.parametrize("verb", ["scan", "build"])
def test_help_leaves_out_what_a_verb_only_refuses(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"--worker ", text) is None
    assert re.search(r"--workers ", text)


def test_the_contract_knows_every_verb() -> None:
    assert set(every_verb()) - {"demo"} == set(CONTRACT)


def test_the_programs_help_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb.split()[0] in text for verb in every_verb())


def test_build_makes_three_banks_that_prove_themselves(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("texts", "tokens", "features"):
        assert main(["verify", str(built / part)]) == 0
        assert "FAIL" not in capsys.readouterr().out
    before = tree_bytes(built)
    model = json.loads((built / "features" / "manifest.json").read_text())["model_path"]
    assert main(["build", "--source", f"train={built.parent / 'train.jsonl'}", "--model", model, "--out", str(built)]) == 0
    assert tree_bytes(built) == before


def test_json_is_one_event_a_line_and_ends_with_the_manifest(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = json.loads((built / "features" / "manifest.json").read_text())["model_path"]
    argv = ["encode", str(built / "tokens"), "--model", model, "--out", str(tmp_path / "out"), "--json"]
    assert main(argv) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1]["phase"] == "done"
    assert events[-1]["manifest"] == json.loads((tmp_path / "out" / "manifest.json").read_text())
    encode = [event for event in events if event["phase"] == "encode"]
    assert encode[-1]["done"] == encode[-1]["total"]
    assert encode[-1]["texts_per_second"] > 0
    assert {"phase", "done", "total", "texts_per_second", "eta_seconds"} <= set(encode[-1])
    assert tree_bytes(tmp_path / "out") == tree_bytes(built / "features")


def test_looking_at_a_bank(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = str(built / "features")
    assert main(["info", features]) == 0
    assert re.search(r"state +committed\n", capsys.readouterr().out)
    assert main(["info", str(built), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"texts", "tokens", "features"}
    assert main(["lookup", features, "a shard", "what is thing 3?"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["row", "2"], ["row", "7"]]
    assert main(["lookup", features, "a shard", "absent", "--json"]) == 1
    assert [json.loads(line)["row"] for line in capsys.readouterr().out.splitlines()] == [2, -1]
    assert main(["compare", features, features, "--min-cosine", "0.999"]) == 0
    assert main(["compare", features, features, "--min-cosine", "1.1"]) == 1
    model = json.loads((built / "features" / "manifest.json").read_text())["model_path"]
    capsys.readouterr()
    assert main(["estimate", str(built / "tokens"), "--model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["rows"], found["hidden_size"], found["fits"]) == (61, 32, True)


@pytest.mark.slow
def test_a_failed_check_is_exit_code_1(built: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(built / "features", tmp_path / "bank")
    path = tmp_path / "bank" / "data-00000.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = run("verify", str(tmp_path / "bank"))
    assert done.returncode == 1
    assert re.search(r"FAIL +hashes +bytes differ from the manifest's sha256 in data-00000.arrow", done.stdout)
    assert run("verify", str(tmp_path / "bank"), "--quick").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("encode {tokens} --modell m --out o", "No such option: --modell"),
        ("encode {tokens} --out o", "Pass exactly one of --model and --encoder (neither was given)"),
        ("encode {tokens} --model nowhere/at/all --out o", "nowhere/at/all"),
        ("encode {texts} --encoder tests.banks:TableEncoder --out o", "a bank of texts, expected tokens"),
        ("encode {tokens} --encoder tests.banks:TableEncoder --out o --rows 5", "expected A:B"),
        ("encode {tokens} --encoder tests.banks:TableEncoder --out o --shards 2-1", "expected numbers and ranges"),
        ("encode {tokens} --encoder tests.banks:TableEncoder --out o --worker 2/2", "numbered 0 to n − 1"),
        ("encode {tokens} --encoder tests.banks:TableEncoder --out o --max-batch 0", "max_batch is 0"),
        ("scan --source train= --out o", "expected NAME=PATH"),
        ("scan --source absent --out o", "absent (source 'absent'): no such file"),
        ("scan --source train=absent.jsonl --out o", "absent.jsonl"),
        ("tokenize {texts} --tokenizer nowhere/at/all --out o", "nowhere/at/all"),
        ("verify", "Missing argument"),
        ("lookup {texts} a", "a bank of texts, expected features"),
        ("info absent", "no such folder"),
        ("sing", "No such command"),
    ],
)
def test_mistakes_are_said_in_a_few_lines_with_exit_code_2(built: Path, tmp_path: Path, argv: str, words: str) -> None:
    done = run(*argv.format(tokens=built / "tokens", texts=built / "texts").split(), cwd=tmp_path)
    assert done.returncode == 2
    assert words in re.sub(r"\s*│\n│\s*", " ", done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())  # nor is anything left behind


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = run("info", str(tmp_path / "absent"), "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
def test_a_local_ray_is_started_and_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    argv = ["encode", str(built / "tokens"), "--encoder", "tests.banks:TableEncoder", "--shard-rows", "20", "--out"]
    assert main([*argv, str(tmp_path / "local")]) == 0
    done = run(*argv, str(tmp_path / "ray"), "--engine", "ray", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert tree_bytes(tmp_path / "ray") == tree_bytes(tmp_path / "local")


@pytest.mark.slow
def test_without_ray_the_engine_says_what_to_install(built: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from arrowbank.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["encode", str(built / "tokens"), "--encoder", "tests.banks:TableEncoder", "--engine", "ray", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install 'arrowbank[ray]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on(built: Path, tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    argv = ["encode", str(built / "tokens"), "--encoder", "tests.banks:SlowEncoder", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "arrowbank", *argv],
        env={**os.environ, "PYTHONPATH": str(root)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a runner may have it ignored
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"this goes on from there:\n  arrowbank {' '.join(argv)}" in errors
    assert "Traceback" not in errors
