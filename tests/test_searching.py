"""Searching a bank: queries go the way that its texts went, by the very model that made it, or not at all."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from arrowbank import BuildConfig, SearchConfig, Searcher, build
from arrowbank.bank import open_bank
from arrowbank.cli import main
from arrowbank.errors import ContractError, InputError
from arrowbank.features.encode_config import EncodeConfig, load_custom_encoder
from arrowbank.features.scan import ScanConfig
from arrowbank.features.stored_vectors import finish
from arrowbank.features.tokenize import TokenizeConfig
from arrowbank.models import ModelConfig

ROOT = Path(__file__).parents[1]
SUBJECTS = ("ants", "bees", "cats", "dogs", "eels", "fish", "gnus", "hens")


def make_bank(folder: Path, tokenizer: Path, encode: EncodeConfig, prompt: str = "") -> Path:
    """A feature bank of 16 queries and 16 candidates."""
    folder.mkdir()
    lines = [
        {"query": f"what do {one} think of {n} {other}?", "candidates": [{"text": f"{other}, {n} of them:\n they like {one}"}]}
        for n, (one, other) in enumerate(zip(SUBJECTS * 2, SUBJECTS[3:] + SUBJECTS[:3] + SUBJECTS, strict=True))
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = BuildConfig(
        scan=ScanConfig(sources=(("train", str(folder / "train.jsonl")),)),
        tokenize=TokenizeConfig(
            tokenizer=str(tokenizer), max_tokens=12, special_tokens="on", prompt=(prompt,) if prompt else ()
        ),
        encode=encode,
    )
    build(config, folder / "bank")
    return folder / "bank" / "features"


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A bank made by a tiny Bert, with a prompt, normalised."""
    config = EncodeConfig(model=ModelConfig(model=str(tiny_bert), device="cpu"))
    return make_bank(tmp_path_factory.mktemp("search") / "bert", tiny_bert, config, prompt="search: ")


@pytest.fixture(scope="module")
def own_bank(tmp_path_factory: pytest.TempPathFactory, wordpiece_tokenizer: Path) -> Path:
    """A bank made by an encoder of one's own, not normalised, without a mirror."""
    config = EncodeConfig(encoder="tests.banks:TableEncoder", normalize=False, mirror=False)
    return make_bank(tmp_path_factory.mktemp("search") / "own", wordpiece_tokenizer, config)


@pytest.fixture(scope="module")
def short_bank(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A bank of the first dimensions of a tiny Bert's vectors, normalised."""
    config = EncodeConfig(model=ModelConfig(model=str(tiny_bert), device="cpu"), dim=20)
    return make_bank(tmp_path_factory.mktemp("search") / "short", tiny_bert, config)


@pytest.mark.parametrize("which", ["bank", "own_bank", "short_bank"])
def test_a_text_of_the_bank_gets_the_vector_that_the_bank_has_for_it(which: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(which)
    searcher = Searcher(folder, SearchConfig(encoder="tests.banks:TableEncoder" if which == "own_bank" else None))
    texts = searcher.bank.dataset["text"]
    vectors = searcher.encode([f"  {text} \n" for text in texts])
    stored, _ = finish(
        vectors, normalize=which != "own_bank"
    )  # NumPy sums norms in another order, which now and then shows in a bit
    assert stored.tobytes() == open_bank(folder).take(np.arange(len(texts))).tobytes()
    for row, hits in enumerate(searcher.search(texts, 5)):
        assert (searcher.bank.take([hits[0].row]) == searcher.bank.take([row])).all()  # itself, or one of the same tokens
        assert hits[0].cosine == pytest.approx(1, abs=1e-3)
        assert [hit.cosine for hit in hits] == sorted((hit.cosine for hit in hits), reverse=True)
        assert [texts[hit.row] for hit in hits] == [hit.text for hit in hits]


def test_only_texts_of_the_kind_asked_for_are_found(bank: Path) -> None:
    hits = Searcher(bank, SearchConfig(kind="candidate")).search(["what do ants think of 3 eels?"], 100)[0]
    assert len(hits) == 16
    assert {hit.kind for hit in hits} == {"candidate"}
    with pytest.raises(InputError, match="no text of kind 'answer'; its kinds are candidate, query"):
        Searcher(bank, SearchConfig(kind="answer"))


def test_faiss_gives_the_same_hits(bank: Path) -> None:
    pytest.importorskip("faiss")
    for kind in (None, "query"):
        plain, indexed = (Searcher(bank, SearchConfig(kind=kind, faiss=faiss)) for faiss in (False, True))
        assert indexed.search(["cats", "seven hens"], 7) == plain.search(["cats", "seven hens"], 7)


def test_the_same_model_in_another_folder_is_the_same_model(bank: Path, tiny_bert: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_bert, tmp_path / "moved")
    query = ["two dogs"]
    assert Searcher(bank, SearchConfig(model=str(moved))).search(query) == Searcher(bank).search(query)


def test_a_model_that_was_moved_is_asked_for(wordpiece_tokenizer: Path, tmp_path: Path) -> None:
    shutil.copytree(wordpiece_tokenizer, tmp_path / "here")
    made = make_bank(tmp_path / "own", tmp_path / "here", EncodeConfig(encoder="tests.banks:TableEncoder"))
    shutil.move(tmp_path / "here", tmp_path / "there")
    with pytest.raises(InputError, match="say where: --model M, --tokenizer M"):
        Searcher(made, SearchConfig(encoder="tests.banks:TableEncoder"))
    config = SearchConfig(encoder="tests.banks:TableEncoder", tokenizer=str(tmp_path / "there"))
    assert Searcher(made, config).search(["ants"], 1)


def test_other_weights_are_refused(bank: Path, tiny_bert: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tiny_bert, tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(ContractError, match=r"model_sha256 is .*Give the model that the bank was made with") as caught:
        Searcher(bank, SearchConfig(model=str(other)))
    assert caught.value.field == "model_sha256"


def test_another_tokenizer_is_refused(bank: Path, bpe_tokenizer: Path) -> None:
    with pytest.raises(ContractError, match="tokenizer_fingerprint is") as caught:
        Searcher(bank, SearchConfig(tokenizer=str(bpe_tokenizer)))
    assert caught.value.field == "tokenizer_fingerprint"


def test_another_version_of_ones_own_encoder_is_refused(own_bank: Path) -> None:
    assert Searcher(own_bank, SearchConfig(encoder="tests.banks:TableEncoder")).search(["bees"], 1)
    with pytest.raises(ContractError, match="version is '1', that of what would search it '2'") as caught:
        Searcher(own_bank, SearchConfig(encoder="tests.banks:OtherVersion"))
    assert caught.value.field == "version"


def test_an_encoder_that_only_the_bank_names_is_not_run(
    wordpiece_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its module would leave a file behind when it is imported. The user may name it, or another one, or trust what the bank names."""
    module = "named_by_a_bank"
    (tmp_path / f"{module}.py").write_text(
        "from pathlib import Path\nfrom tests.banks import TableEncoder as factory\n"
        f"(Path({str(tmp_path)!r}) / 'ran').write_text('yes')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bank = make_bank(tmp_path / "made", wordpiece_tokenizer, EncodeConfig(encoder=f"{module}:factory"))
    (tmp_path / "ran").unlink()
    del sys.modules[module]
    load_custom_encoder.cache_clear()
    for config in (None, SearchConfig(), SearchConfig(tokenizer=str(wordpiece_tokenizer), kind="query")):
        with pytest.raises(InputError, match=rf"'{module}:factory'\. Code that a bank names is not run"):
            Searcher(bank, config)
    assert main(["search", str(bank), "bees"]) == 2
    assert f"--encoder {module}:factory" in capsys.readouterr().err
    assert Searcher(bank, SearchConfig(encoder="tests.banks:TableEncoder")).search(["bees"], 1)
    assert not (tmp_path / "ran").exists()
    assert main(["search", str(bank), "bees", "--trust-remote-code"]) == 0
    assert (tmp_path / "ran").exists()
    assert Searcher(bank, SearchConfig(encoder=f"{module}:factory")).search(["bees"], 1)


def test_a_model_is_no_encoder_and_an_encoder_no_model(bank: Path, own_bank: Path, tiny_bert: Path) -> None:
    with pytest.raises(ContractError, match=r"made with the encoder tests\.banks:TableEncoder, not with"):
        Searcher(own_bank, SearchConfig(model=str(tiny_bert), tokenizer=open_bank(own_bank).manifest["tokenizer"]))
    with pytest.raises(ContractError, match="made with the model"):
        Searcher(bank, SearchConfig(encoder="tests.banks:TableEncoder"))
    with pytest.raises(InputError, match=r"Pass at most one of --model and --encoder \(both were given\)"):
        SearchConfig(model="a", encoder="b:c")


def test_an_empty_query_is_refused(bank: Path) -> None:
    with pytest.raises(InputError, match="a query is empty"):
        Searcher(bank).search(["cats", " \n"])


# the command line


def test_the_command_prints_what_is_found(bank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hits = Searcher(bank).search(["eels", "fish"], 2)
    assert main(["search", str(bank), "-k", "2", "--json", "eels", "fish"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said == [
        {"query": query, "rank": rank, **asdict(hit)}
        for query, found in zip(("eels", "fish"), hits, strict=True)
        for rank, hit in enumerate(found, 1)
    ]
    assert main(["search", str(bank), "-k", "1", "--where", "kind=candidate", "eels"]) == 0
    line = capsys.readouterr().out
    assert line.count("\n") == 1  # the text has a line feed
    assert " 1  " in line
    assert "candidate" in line


@pytest.mark.parametrize("where", ["query", "kind=", "source=train"])
def test_a_filter_that_is_none_is_refused(bank: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(bank), "--where", where, "x"]) == 2
    assert "expected kind=KIND" in capsys.readouterr().err


@pytest.mark.slow
def test_lines_on_standard_input_are_answered_until_it_ends(bank: Path) -> None:
    command = [sys.executable, "-m", "arrowbank", "search", str(bank), "-k", "2", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for query in ("cats", "bees"):  # each is answered before the next one is asked
            process.stdin.write(f"\n{query}\n")
            process.stdin.flush()
            answers = [json.loads(process.stdout.readline()) for _ in range(2)]
            assert [answer["query"] for answer in answers] == [query] * 2
        process.stdin.close()
        assert process.stdout.read() == ""
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("leaving", ["Ctrl-D", "Ctrl-C"])
def test_at_a_terminal_there_is_a_prompt(bank: Path, leaving: str) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "arrowbank", "search", str(bank), "-k", "1"]
    plain = {**os.environ, "TERM": "dumb"}  # no escape sequences around the prompt
    with subprocess.Popen(command, cwd=ROOT, env=plain, stdin=slave, stdout=slave) as process:
        os.close(slave)
        read_until(master, b"> ")
        os.write(master, b"cats\n")
        assert b"row " in read_until(master, b"\n> ")
        if leaving == "Ctrl-D":
            os.write(master, b"\x04")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    os.close(master)


def read_until(terminal: int, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 1024)
    return seen
