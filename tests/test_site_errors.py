"""The page of errors: each of them is there, with a command that really raises it and the message that it really gives."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from arrowbank import BuildConfig, EncodeConfig, ModelConfig, RunOptions, ScanConfig, TokenizeConfig, build, encode, errors
from arrowbank.bank.locks import FolderLock
from arrowbank.cli import main
from tests import docpages, dumps

BAD_ENCODER = """
import numpy as np

class Encoder:
    hidden_size, version = 4, "1"
    def encode(self, input_ids):
        return np.full((len(input_ids), 4), np.nan, np.float32)
"""
DYING_ENCODER = """
import os, signal

class Encoder:
    hidden_size, version = 4, "1"
    def encode(self, input_ids):
        os.kill(os.getpid(), signal.SIGKILL)
"""
NAMES = [
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.ArrowbankError) and value is not errors.ArrowbankError
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Iterator[Path]:
    """A folder in which everything that the page's commands name is there, and wrong in the way that the page says."""
    folder = tmp_path_factory.mktemp("errors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{docpages.ROOT}")
        patch.setitem(sys.modules, "ray", None)
        patch.delitem(sys.modules, "arrowbank.engine.ray_pool", raising=False)  # another test may have imported it with Ray
        (folder / "Qwen").mkdir()
        (folder / "Qwen" / "Qwen3-4B").symlink_to(tiny_qwen3)
        texts = ("Where does Ada live?", "What does Bob do?", "Who builds boats?")
        Path("train.jsonl").write_text("".join(json.dumps({"query": text}) + "\n" for text in texts))
        Path("broken.jsonl").write_text('{"query": "a"}\n{"query": \n')
        Path("failing.jsonl").symlink_to("/proc/self/mem")  # a file whose first page nobody can read
        Path("bad_encoder.py").write_text(BAD_ENCODER)
        Path("dying_encoder.py").write_text(DYING_ENCODER)
        dumps.make_dump(Path("dump"))
        config = BuildConfig(
            scan=ScanConfig(sources=(("train", "train.jsonl"),)),
            tokenize=TokenizeConfig(tokenizer="Qwen/Qwen3-4B"),
            encode=EncodeConfig(model=ModelConfig(model="Qwen/Qwen3-4B")),
        )
        build(config, "router")
        cut = EncodeConfig(model=ModelConfig(model="Qwen/Qwen3-4B"), shard_rows=2)
        encode(cut, "router/tokens", "unfinished", options=RunOptions(shards=(0,)))
        Path("other.jsonl").write_text('{"query": "Nobody asks this elsewhere."}\n')
        build(replace(config, scan=ScanConfig(sources=(("train", "other.jsonl"),))), "elsewhere")
        shutil.copytree("router/features", "damaged")
        shard = Path("damaged/data-00000.arrow")
        shard.write_bytes(shard.read_bytes()[:-100])
        Path("busy/journal").mkdir(parents=True)
        lock = FolderLock(Path("busy/journal"))
        yield folder
        lock.release()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_error_of_the_page_is_what_the_program_says(name: str, place: Path) -> None:
    page = (docpages.DOCS / "errors.md").read_text(encoding="utf-8")
    section = re.findall(rf"^## `{name}`\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    assert len(section) == 1, f"errors.md has no section on {name}"
    example = r'```console title="exit code (\d)"\n\$ (.*?)\n(.*?)```'
    examples = re.findall(example, section[0], flags=re.DOTALL)
    assert examples, f"errors.md has no example of {name}"
    for code, command, shown in examples:
        said = said_by(name, int(code), shlex.split(command))
        assert re.fullmatch(re.escape(shown).replace("…", ".*?"), said, flags=re.DOTALL), said


def said_by(name: str, code: int, words: list[str]) -> str:
    """What the program says of the command `words`, which raises the error `name`."""
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert f"arrowbank.errors.{name}: " in done.stderr
        return done.stderr
    with pytest.raises(errors.ArrowbankError) as raised:
        main([*words[1:], "--debug"])
    assert type(raised.value).__name__ == name
    assert raised.value.exit_code == code
    return f"arrowbank: {raised.value}\n"
