"""The card of a pushed bank: what the hub and `load_dataset` make of it, and what a person reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from html import unescape as html_unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest
import yaml
from datasets import Dataset, Features, List, Value, load_from_disk
from hypothesis import given
from hypothesis import strategies as st

from arrowbank import (
    EncodeConfig,
    In2Config,
    ProbesConfig,
    TrunkData,
    build_in2,
    build_probes,
    build_trunk,
    encode,
    open_bank,
    pull,
    push,
    verify,
)
from arrowbank.bank import BankWriter
from arrowbank.bank.cards import as_code, as_text, card
from arrowbank.bank.kinds import typed
from arrowbank.cli import main
from arrowbank.share.card import card_text, pushed_card, sample_table
from arrowbank.share.pictures import Distribution, Spread, picture_of, svg
from tests.arms import save_filler
from tests.banks import WIDTH, make_texts, make_tokens
from tests.hub_server import Hub
from tests.target_banks import make_target_bank
from tests.trunk_banks import make, write_ids

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes/text content:DeprecationWarning")

ADDRESS = "hf://datasets/org/name"


def make_features(folder: Path) -> Path:
    """A feature bank of 40 texts in `folder`/features, with texts and tokens beside it."""
    make_texts(folder / "texts")
    make_tokens(folder / "tokens", folder / "texts")
    encode(EncodeConfig(encoder="tests.banks:TableEncoder", shard_rows=15), folder / "tokens", folder / "features")
    return folder / "features"


def front_matter(card: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match
    loaded = yaml.safe_load(match[1])
    assert isinstance(loaded, dict)
    return loaded


def python_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


@pytest.mark.slow
def test_a_pushed_bank_loads_with_its_types_and_its_card_runs(hub: Hub, tmp_path: Path) -> None:
    """`load_dataset` and every block of the card, as written, in processes of their own; the shell's in between."""
    bank = make_features(tmp_path)
    push(bank, "org/features")
    card = hub.repos["org/features"].files["README.md"][0].decode()
    blocks = python_blocks(card)
    assert [block.split()[3] for block in blocks] == ["load_dataset", "open_bank", "open_bank"]
    assert "arrowbank pull org/features features\n" in card
    pull("org/features", tmp_path / "pulled" / "features")

    shown = 'print(rows.features["features"], len(rows)); rows.save_to_disk("loaded")'
    code = (
        blocks[0]
        + shown
        + "\n"
        + blocks[1]
        + "print(len(bank), type(bank).__name__)\n"
        + blocks[2]
        + "print(matrix.shape, row)\n"
    )
    done = run_python(code, tmp_path / "pulled")
    assert done.splitlines() == [
        f"List(Value('float16'), length={WIDTH}) 40",
        "40 FeatureBank",
        f"(40, {WIDTH}) [-1]",
    ]
    wanted = Features(
        text=Value("large_string"),
        kind=Value("string"),
        sha1=Value("binary"),
        length=Value("int32"),
        features=List(Value("float16"), length=WIDTH),
    )
    there, ours = load_from_disk(str(tmp_path / "pulled" / "loaded")), load_from_disk(str(bank))
    pulled = load_from_disk(str(tmp_path / "pulled" / "features"))
    assert isinstance(there, Dataset)
    assert there.features == ours.features == pulled.features == wanted
    assert there.data.table.combine_chunks() == ours.data.table.combine_chunks()


def run_python(code: str, folder: Path) -> str:
    """Standard output of `code` in a process of its own that has `folder` as its working directory."""
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r})\n{code}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_half_pushed_bank_does_not_load(hub: Hub, tmp_path: Path) -> None:
    make_texts(tmp_path / "texts", 40, shard_rows=10)
    push(tmp_path / "texts", "org/texts")
    halfway = list(hub.repos["org/texts"].commits.values())[-2]
    assert "data-00000.arrow" in halfway
    hub.repos["org/texts"].add(halfway)
    code = (
        "from datasets import load_dataset\ntry:\n    print(load_dataset('org/texts', split='train'))\n"
        "except FileNotFoundError as error:\n    print('refused')"
    )
    assert run_python(code, tmp_path) == "refused\n"


def test_what_the_card_says(tmp_path: Path) -> None:
    bank = open_bank(make_features(tmp_path))
    card = card_text(bank, ADDRESS, verify(bank.folder), license="cc-by-4.0", plot=True)
    fields = front_matter(card)
    assert fields["license"] == "cc-by-4.0"
    assert fields["configs"] == [{"config_name": "default", "data_files": "data-*.arrow"}]
    assert fields["size_categories"] == ["n<1K"]
    assert "arrowbank" in fields["tags"]
    assert {"name": "features", "list": "float16", "length": WIDTH} in fields["dataset_info"]["features"]
    for said in (
        "# name\n",
        bank.plan_digest,
        bank.content_digest,
        f"40 × {WIDTH}",
        "text number 1 of many",
        "![",
        "| hashes | ok |",
    ):
        assert said in card
    assert card_text(bank, ADDRESS, verify(bank.folder), license="cc-by-4.0", plot=True) == card
    assert "license" not in front_matter(card_text(bank, ADDRESS, []))


def test_a_hub_models_name_is_a_tag_and_a_folder_is_not(tmp_path: Path) -> None:
    make_target_bank(tmp_path / "targets")
    bank = open_bank(tmp_path / "targets")
    assert "base_model:org/target" in front_matter(card_text(bank, ADDRESS, []))["tags"]
    bank.manifest.json["target_model_name_or_path"] = str(tmp_path)
    assert not [tag for tag in front_matter(card_text(bank, ADDRESS, []))["tags"] if tag.startswith("base_model")]


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> dict[str, Path]:
    """A bank of each kind that is quick to make."""
    folder = tmp_path_factory.mktemp("banks")
    make_features(folder)
    make_target_bank(folder / "targets")
    filler = save_filler(folder / "filler.bin")
    for arm in "ac":
        build_in2(In2Config(arm=arm, length=600, examples=3, triples=2, vocab=1000), [filler], folder / f"in2-{arm}")
    build_probes(ProbesConfig(length=600, blocks=1, vocab=1000), [filler], folder / "in2-probes")
    write_ids(folder / "ids.jsonl", 30)
    build_trunk(make(tiny_qwen3, TrunkData("ids", str(folder / "ids.jsonl")), layers=(0, 1)), folder / "trunk")
    (folder / "trunk-taps").rename(folder / "taps")
    return {manifest.parent.name: manifest.parent for manifest in folder.glob("*/manifest.json")}


def test_every_kind_has_a_card_a_sample_and_a_picture(banks: dict[str, Path]) -> None:
    assert set(banks) == {"texts", "tokens", "features", "targets", "in2-a", "in2-c", "in2-probes", "trunk", "taps"}
    for name, folder in banks.items():
        bank = open_bank(folder)
        card = card_text(bank, ADDRESS, verify(folder))
        table = Dataset.from_file(str(folder / "data-00000.arrow"))
        declared = front_matter(card)["dataset_info"]["features"]
        assert Features._from_yaml_list(declared) == table.features
        assert card.count("\n|") >= 5
        assert "FAILED" not in card
        picture = picture_of(bank)
        assert (picture is None) == (name == "in2-a")
        if picture:
            drawn = ElementTree.fromstring(svg(picture))
            assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
            assert svg(picture) == svg(picture)


def test_the_card_of_a_models_vectors_says_how_they_were_computed(tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"query": "where?", "candidates": [{"text": "here"}]}\n')
    model, out = str(tiny_bert), tmp_path / "bank"
    assert main(["build", "--source", f"train={tmp_path / 'train.jsonl'}", "--model", model, "--out", str(out)]) == 0
    bank = open_bank(out / "features")
    card = card_text(bank, ADDRESS, [])
    weights, tokenizer = bank.manifest["encoding"]["model_sha256"], bank.manifest["tokenizer_fingerprint"]
    for line in (
        f"- model: {tiny_bert.name}",
        f"- tokenizer: {tiny_bert.name}",
        "- pooling: mean",
        "- computed in: float32",
        f"- sha256 of model: `{weights}`",
        f"- fingerprint of tokenizer: `{tokenizer}`",
    ):
        assert f"{line}\n" in card


def test_a_folder_of_the_machine_is_not_on_the_card(banks: dict[str, Path]) -> None:
    bank = open_bank(banks["trunk"])
    assert str(bank.manifest["model_path"]).startswith("/")
    assert str(banks["trunk"].parent.parent) not in card_text(bank, ADDRESS, verify(banks["trunk"]))


def test_pictures_show_what_is_there(banks: dict[str, Path]) -> None:
    lengths = picture_of(open_bank(banks["tokens"]))
    assert isinstance(lengths, Distribution)
    assert sorted(set(lengths.values.tolist())) == list(range(1, 10))
    norms = picture_of(open_bank(banks["targets"]))
    assert isinstance(norms, Spread)
    assert norms.names == ["1", "11", "21", "last"]
    assert (norms.percentiles[:, 0] > 0).all()
    assert (norms.percentiles[:, 0] <= norms.percentiles[:, 2]).all()
    distances = picture_of(open_bank(banks["in2-c"]))
    assert isinstance(distances, Distribution)
    assert distances.values.min() > 0


def test_a_card_is_pushed_after_its_plot(tmp_path: Path) -> None:
    make_texts(tmp_path / "texts")
    plot, card = pushed_card(open_bank(tmp_path / "texts"), ADDRESS, [])
    assert (plot.name, card.name) == ("plot.svg", "README.md")
    assert b"](plot.svg)" in card.contents()


def test_a_sample_is_short_and_nothing_but_text(tmp_path: Path) -> None:
    nasty = "a | pipe\nand <script>alert(1)</script> **bold** `code` [link](http://x) " + "long " * 50
    batch = pa.record_batch(
        {
            "text": pa.array([nasty, ""], pa.large_string()),
            "input_ids": pa.array([list(range(100)), []], pa.list_(pa.int32())),
            "vector": pa.array([[0.5] * 8, [1.0] * 8], pa.list_(pa.float16(), 8)),
            "states": pa.array([[[1] * 4] * 3, []], pa.list_(pa.list_(pa.uint16(), 4))),
            "position": pa.array([float("nan"), 0.25]),
        }
    )
    with BankWriter(tmp_path / "bank", kind="nasty", recipe={}) as writer:
        writer.write_shard(0, batch)
        writer.commit(rows=2)
    lines = sample_table(open_bank(tmp_path / "bank")).splitlines()
    assert len(lines) == 4
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 6 for line in lines)
    assert "<script>" not in lines[2]
    assert r"\*\*bold\*\*" in lines[2]
    numbers = "[0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000, … 8 in all]"
    assert lines[2].endswith(f"| [0, 1, 2, 3, 4, 5, … 100 in all] | {numbers} | 3 × 4 bfloat16 (as uint16) | nan |")
    assert len(lines[2]) < 400


def test_an_arms_card_says_where_its_needles_lie(banks: dict[str, Path]) -> None:
    assert "anywhere far enough before its probe" in card_text(open_bank(banks["in2-c"]), ADDRESS, [])


HOSTILE = (
    "[click](https://bad.example) ![pixel](https://bad.example/p.png) <script>alert(1)</script> <img src=x onerror=alert(1)> "
    "`code` **bold** | cell | ``` ~~~\n\n# heading\n\n---\nlicense: evil\n---\n- item\n\x1b[31m\x00\u202ereversed\u2028&lt;b&gt; "
    "__x__ ~~gone~~"
)


def seen(character: str) -> bool:
    """Whether a reader sees the character, or needs it for scripts and emoji."""
    return unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp") or character in "\u200c\u200d"


def a_manifest(kind: str, **fields: Any) -> dict[str, Any]:
    counts = {"tokens": 1, "kept": 1, "loss_tokens": 1, "dropped": {}}
    every = {
        "format": "",
        "kind": kind,
        "plan_digest": "",
        "rows": 3,
        "complete": True,
        "files": [],
        "counts": counts,
        "recipe": {},
    }
    return every | fields


@pytest.mark.parametrize(
    "manifest",
    [
        a_manifest(
            "features",
            model_path=HOSTILE,
            kinds={HOSTILE: 3},
            encoding={"pooling": HOSTILE, "normalize": True},
            hidden_size=2,
            max_key_tokens=9,
        ),
        a_manifest(
            "texts", sources=[{"name": HOSTILE, "file": HOSTILE, "bytes": 3}], source_rows={HOSTILE: 1}, kinds={HOSTILE: 3}
        ),
        a_manifest("tokens", tokenizer=HOSTILE, max_tokens=9),
        a_manifest(
            "targets",
            **{
                "target_model_name_or_path": HOSTILE,
                "loss_mask": HOSTILE,
                "target_layer_ids": [1],
                "layers": 1,
                "hidden_size": 2,
            },
            **{"codec": "bf16", "spans": "all", "last_hidden_norm": "post", "vocab_size": None, "num_hidden_layers": None},
        ),
        a_manifest(HOSTILE),
    ],
    ids=lambda manifest: manifest["kind"][:8],
)
def test_no_string_of_a_manifest_is_markup_in_a_card(manifest: dict[str, Any]) -> None:
    """Rendered by a Markdown library, the card has no element that a card of harmless strings lacks, and shows the strings."""
    harmless = json.loads(json.dumps(manifest).replace(json.dumps(HOSTILE)[1:-1], "harmless"))
    text, other = (card(typed(one, "manifest.json")) for one in (manifest, harmless))
    assert front_matter(text) == front_matter(other)
    assert elements(text) == elements(other)
    assert len(text.splitlines()) == len(other.splitlines())
    assert all(seen(character) for line in text.split("\n") for character in line)


def elements(card: str) -> dict[str, int]:
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(card.split("---\n", 2)[2])
    return Counter(re.findall(r"<[^>]*>", html))


@pytest.mark.slow
@given(st.text(max_size=40))
def test_any_text_is_shown_as_it_is_in_a_card(text: str) -> None:
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    shown = " ".join(text.split())
    for written, element in ((as_text(f"x {text}"), "p"), (as_code(text or "x"), "code")):
        assert all(map(seen, written))
        html = markdown.render(f"- fact: {written}\n")
        assert set(re.findall(r"</?([a-z0-9]+)", html)) <= {"ul", "li", element}
    plain = "".join(one if seen(one) else "\ufffd" for one in shown)
    if plain.isascii():
        rendered = html_unescape(re.sub("<[^>]*>", "", markdown.render(f"x {as_text(text)}"))).strip()
        assert rendered == f"x {plain}".strip()


def test_column_names_are_text_in_a_sample(tmp_path: Path) -> None:
    with BankWriter(tmp_path / "bank", kind="odd", recipe={}) as writer:
        writer.write_shard(0, pa.record_batch({HOSTILE: pa.array([[HOSTILE]])}))
        writer.commit(rows=1)
    table = sample_table(open_bank(tmp_path / "bank"))
    assert len(table.splitlines()) == 3
    assert "<script" not in table
    assert "](" not in table.replace("\\](", "")
