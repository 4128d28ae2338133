"""`encode --pooling none`: a vector per token, equal to what transformers gives for the text alone, in a kind of bank of its own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from arrowbank import (
    BuildConfig,
    EncodeConfig,
    ModelConfig,
    RunOptions,
    ScanConfig,
    SelectConfig,
    TokenizeConfig,
    build,
    encode,
    estimate_encode,
    merge,
    open_bank,
    select,
    tokenize,
    verify,
)
from arrowbank.bank.info import describe_folder
from arrowbank.bank.kinds.token_features_bank import TokenFeatureBank
from arrowbank.engine.plan import BatchRules
from arrowbank.errors import BadVector, InputError
from arrowbank.features.search import Searcher
from arrowbank.models import describe
from arrowbank.report.write import ReportConfig, write_report
from arrowbank.share.card import card_text
from tests import tiny
from tests.kill import kill_at, tree_bytes

TEXTS = tiny.texts(50)
ADDRESS = "hf://datasets/org/tokens"
RULES = BatchRules(max_batch=4, token_budget=128)


def config(model: Path, **options: Any) -> EncodeConfig:
    own = {name: options.pop(name) for name in ("dim", "normalize", "limit", "mirror", "onto", "shard_rows") if name in options}
    settings = {"model": str(model), "device": "cpu", "dtype": "float32", "pooling": "none"} | options
    return EncodeConfig(model=ModelConfig(**settings), rules=RULES, **{"shard_rows": 20} | own)


@pytest.fixture(scope="module", params=["tiny_bert", "tiny_qwen3"])
def model(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(scope="module")
def tokens(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("token-features")
    texts = tiny.save_texts_bank(folder / "texts", TEXTS)
    tokenize(TokenizeConfig(tokenizer=str(model), max_tokens=24), texts, folder / "tokens")
    return folder / "tokens"


@pytest.fixture(scope="module")
def bank(model: Path, tokens: Path) -> TokenFeatureBank:
    encode(config(model), tokens, tokens.parent / "out")
    return open_bank(tokens.parent / "out", kind=TokenFeatureBank)


def directly(model: Path, text: str, layer: int = -1) -> torch.Tensor:
    """The hidden states of the text's tokens, [T, D], by transformers alone."""
    tokenizer, net = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = net(**tokenizer(text, truncation=True, max_length=24, return_tensors="pt"), output_hidden_states=True)
    return found.hidden_states[layer][0]  # type: ignore[no-any-return]


def test_vectors_are_those_of_transformers(model: Path, bank: TokenFeatureBank) -> None:
    for text, stored in zip(TEXTS, bank.vectors(TEXTS), strict=True):
        expected = torch.nn.functional.normalize(directly(model, text), dim=1)
        assert stored.shape == expected.shape
        assert stored.dtype == np.float16
        assert float(torch.nn.functional.cosine_similarity(torch.from_numpy(stored.copy()).float(), expected).min()) >= 0.99999
        assert np.abs(stored.astype(np.float32) - expected.numpy()).max() < 1e-3


def test_other_layers_lengths_and_dimensions(model: Path, tokens: Path, tmp_path: Path) -> None:
    encode(config(model, layer=1, normalize=False, dim=9), tokens, tmp_path / "out")
    for text, stored in zip(TEXTS[:9], open_bank(tmp_path / "out", kind=TokenFeatureBank).take(range(9)), strict=True):
        assert np.allclose(stored, directly(model, text, 1)[:, :9].numpy(), atol=4e-3)
    assert all(check.ok for check in verify(tmp_path / "out"))


def test_datasets_opens_it(bank: TokenFeatureBank) -> None:
    loaded = datasets.load_from_disk(str(bank.folder))
    assert loaded.column_names == ["text", "kind", "sha1", "length", "features"]
    assert bank.schema.field("features").type == pa.list_(pa.list_(pa.float16(), bank.hidden_size))
    row = loaded.with_format("arrow")[7]["features"].to_pylist()[0]
    assert np.array_equal(np.array(row, np.float16), bank.take([7])[0])
    assert loaded["length"][:] == [len(vectors) for vectors in bank.take(range(len(bank)))]


def test_it_is_a_kind_of_its_own_for_every_command(model: Path, bank: TokenFeatureBank, tmp_path: Path) -> None:
    manifest = bank.manifest
    assert manifest["kind"] == "token-features"
    assert manifest["tokens"] == sum(map(len, bank.take(range(len(bank)))))
    assert manifest["encoding"]["pooling"] == "none"
    assert [check.name for check in verify(bank.folder) if not check.ok] == []
    shown = describe_folder(bank.folder)
    assert (shown["kind"], shown["tokens"], shown["hidden_size"]) == ("token-features", manifest["tokens"], bank.hidden_size)
    card = card_text(bank, ADDRESS, verify(bank.folder))
    assert "Token feature bank" in card
    code = next(code for code in re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL) if "score" in code)
    names: dict[str, Any] = {}
    exec(compile(re.sub(r'open_bank\(".*?"\)', f'open_bank("{bank.folder}")', code), "card", "exec"), names)
    assert names["score"] > 0
    (row,) = re.findall(
        r"^\| `token-features` \| (.*) \|$", (Path(__file__).parents[1] / "FORMAT.md").read_text(), flags=re.MULTILINE
    )
    assert re.findall(r"`(\w+)`", row) == bank.columns
    write_report(ReportConfig(), [bank.folder], tmp_path / "report.html")
    assert "Tokens a text" in (tmp_path / "report.html").read_text()
    select(SelectConfig(rows=(0, 20)), bank.folder, tmp_path / "first")
    select(SelectConfig(rows=(10, 50)), bank.folder, tmp_path / "rest")
    merged = merge([tmp_path / "first", tmp_path / "rest"], tmp_path / "merged")
    assert (merged["rows"], merged["tokens"]) == (50, manifest["tokens"])
    for name in ("first", "rest", "merged"):
        assert [str(check) for check in verify(tmp_path / name) if not check.ok] == []
    again = open_bank(tmp_path / "merged", kind=TokenFeatureBank)
    assert all(np.array_equal(*pair) for pair in zip(again.vectors(TEXTS), bank.vectors(TEXTS), strict=True))
    with pytest.raises(InputError, match="a bank of token-features, expected features"):
        Searcher(bank.folder)


def test_torch_gets_a_tensor_per_text(bank: TokenFeatureBank) -> None:
    loader = torch.utils.data.DataLoader(bank.to_torch(), batch_size=7, collate_fn=list)
    found = [vectors for batch in loader for vectors in batch]
    assert [tuple(vectors.shape) for vectors in found] == [(n, bank.hidden_size) for n in bank.dataset["length"]]
    assert all(torch.equal(one, torch.from_numpy(other)) for one, other in zip(found, bank.vectors(TEXTS), strict=True))


def test_damage_is_found(bank: TokenFeatureBank, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bank.folder, tmp_path / "bank"))
    path, vector = folder / "data-00001.arrow", bank.take([20])[0][5]
    data = path.read_bytes()
    assert data.count(vector.tobytes()) == 1
    path.write_bytes(data.replace(vector.tobytes(), (2 * vector).tobytes()))
    failed = {check.name: check.detail for check in verify(folder) if not check.ok}
    assert set(failed) == {"hashes", "vectors"}
    assert "row 20 token 5 (norm 2" in failed["vectors"]


@pytest.mark.slow
def test_it_resumes_to_the_same_bytes(model: Path, tokens: Path, bank: TokenFeatureBank, tmp_path: Path) -> None:
    out, moment, deaths = tmp_path / "out", 0, 0
    while (outcome := kill_at(moment := moment + 9, encode, config(model), tokens, out, options=RunOptions(workers=1))).killed:
        deaths += 1
    assert outcome.error == ""
    assert deaths > 1
    assert tree_bytes(out) == tree_bytes(bank.folder)


def test_its_size_is_known_first(model: Path, tokens: Path, bank: TokenFeatureBank) -> None:
    found = estimate_encode(config(model), tokens, timed=False)
    written = sum(path.stat().st_size for path in bank.folder.glob("data-*.arrow"))
    assert written * 0.9 < found.shard_bytes < written * 1.2
    assert found.beside == {"keys": 16 * len(TEXTS)}
    wide = encode(config(model, shard_rows=65536, limit=10), tokens, tokens.parent / "limited")
    assert (wide["rows"], len(wide["files"]) > 1) == (10, True)


def test_build_makes_one(model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"query": text}) + "\n" for text in TEXTS))
    asked = BuildConfig(
        scan=ScanConfig(sources=(("train", str(tmp_path / "train.jsonl")),)),
        tokenize=TokenizeConfig(tokenizer=str(model)),
        encode=config(model),
    )
    assert build(asked, tmp_path / "out")["kind"] == "token-features"


def test_what_has_no_meaning_with_it_is_refused(model: Path, tokens: Path, tmp_path: Path) -> None:
    for options in ({"mirror": False}, {"onto": str(tokens)}):
        with pytest.raises(InputError, match="has no effect with --pooling none"):
            config(model, **options)


# folders of sentence-transformers


def encoded(folder: Path, out: Path) -> TokenFeatureBank:
    """The bank of TEXTS by the model in `folder`, with what the folder asks of texts."""
    out.mkdir()
    texts = tiny.save_texts_bank(out / "texts", TEXTS)
    tokenize(TokenizeConfig(tokenizer=str(folder)), texts, out / "tokens")
    encode(config(folder), out / "tokens", out / "features")
    return open_bank(out / "features", kind=TokenFeatureBank)


def save_multi_vector(base: Path, out: Path, *, skiplist: Sequence[str] = (), seed: int = 0) -> Any:
    """A late-interaction model, saved by sentence-transformers itself; the model."""
    peer = pytest.importorskip("sentence_transformers.multi_vector_encoder")
    modules = pytest.importorskip("sentence_transformers.base.modules")
    torch.manual_seed(seed)
    on_tokens = {"module_input_name": "token_embeddings"}
    parts = [
        modules.Transformer(str(base)),
        modules.Dense(32, 16, bias=False, activation_function=torch.nn.Identity(), **on_tokens),
        peer.modules.MultiVectorMask(list(skiplist)),
        modules.Normalize(**on_tokens),
    ]
    model = peer.MultiVectorEncoder(modules=parts, device="cpu")
    model.save(str(out))
    return model


def test_a_late_interaction_folder_gives_what_sentence_transformers_gives(tiny_bert: Path, tmp_path: Path) -> None:
    expected = save_multi_vector(tiny_bert, tmp_path / "model").encode(TEXTS)
    bank = encoded(tmp_path / "model", tmp_path / "bank")
    assert bank.hidden_size == 16
    for stored, wanted in zip(bank.vectors(TEXTS), expected, strict=True):
        assert stored.shape == tuple(wanted.shape)
        assert float(torch.nn.functional.cosine_similarity(torch.from_numpy(stored).float(), wanted).min()) >= 0.99999
    save_multi_vector(tiny_bert, tmp_path / "other", seed=1)
    fingerprints = {
        describe(ModelConfig(model=str(tmp_path / name), pooling="none")).fingerprint for name in ("model", "other")
    }
    assert len(fingerprints) == 2
    with pytest.raises(InputError, match=r"MultiVectorMask.*give --pooling none"):
        describe(ModelConfig(model=str(tmp_path / "model")))


def test_a_folder_that_leaves_tokens_out_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    save_multi_vector(tiny_bert, tmp_path / "model", skiplist=[",", "."])
    with pytest.raises(InputError, match=r"2_MultiVectorMask.config\.json: leaves out the vectors of some tokens"):
        describe(ModelConfig(model=str(tmp_path / "model"), pooling="none"))


def test_tokens_of_an_embedding_folder_are_those_of_sentence_transformers(tiny_bert: Path, tmp_path: Path) -> None:
    peer = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.base.modules")
    pooling = pytest.importorskip("sentence_transformers.sentence_transformer.modules").Pooling
    parts = [
        modules.Transformer(str(tiny_bert), max_seq_length=12),
        pooling(32),
        modules.Dense(32, 8),
        modules.Normalize(),
    ]
    model = peer.SentenceTransformer(modules=parts, device="cpu")
    model.save(str(tmp_path / "model"))
    expected = model.encode(TEXTS, output_value="token_embeddings")
    for stored, wanted in zip(encoded(tmp_path / "model", tmp_path / "bank").vectors(TEXTS), expected, strict=True):
        assert stored.shape == tuple(wanted.shape)
        assert float(torch.nn.functional.cosine_similarity(torch.from_numpy(stored).float(), wanted).min()) >= 0.99999


def test_a_bad_vector_of_a_token_is_named(model: Path, tokens: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "word_embeddings" in name or "embed_tokens" in name)
    token = open_bank(tokens).dataset[30]["input_ids"][-2]
    weights[name][token] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadVector, match=r"(?s)are not finite in float16.*row \d+: "):
        encode(config(folder), tokens, tmp_path / "out")
