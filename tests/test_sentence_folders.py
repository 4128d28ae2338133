"""Embedding folders, against `SentenceTransformer(folder).encode(texts)` of the real package, in float32.

Each folder of the table is tiny, made here, and saved by sentence-transformers itself, or by hand as older versions did.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from arrowbank import BuildConfig, EncodeConfig, ModelConfig, ScanConfig, TokenizeConfig, build, encode, open_bank, tokenize
from arrowbank.cli import main
from arrowbank.errors import InputError
from arrowbank.models import describe, text_rules
from tests import tiny

LEAST = 0.99999
TEXTS = [
    "a b c",
    "The cat sat on the mat.",
    "Upper CASE and lower",
    "one",
    *[f"{sentence} {sentence}" for sentence in tiny.SENTENCES[:6]],
    " ".join(tiny.SENTENCES[:40]),
]
BERTS = [
    "mean",
    "not normalized",
    "cls, as bge",
    "max",
    "mean of the root",
    "weighted mean",
    "last token",
    "two modes",
    "all modes",
    "a default prompt",
    "a prompt that is not pooled",
    "max length",
    "dense",
    "two dense, as EmbeddingGemma",
    "dense with a residual",
    "layer norm",
    "normalized in between",
]
Vectors = npt.NDArray[np.float32]


def real(folder: Path, texts: Sequence[str], **options: Any) -> Vectors:
    """What the package itself gives."""
    import torch
    from sentence_transformers import SentenceTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
        found: Vectors = model.encode(list(texts), batch_size=4, **options)
    return found


def built(
    folder: Path, out: Path, texts: Sequence[str] = TEXTS, *, tokens: dict[str, Any] | None = None, **options: Any
) -> Vectors:
    """The vectors of the texts as `build` stores them, with the defaults."""
    source = out.parent / f"{out.name}.jsonl"
    source.write_text("".join(json.dumps({"query": text}) + "\n" for text in texts))
    config = BuildConfig(
        scan=ScanConfig(sources=(("train", source),), fields=(("query", "query"),)),
        tokenize=TokenizeConfig(tokenizer=str(folder), **(tokens or {})),
        encode=EncodeConfig(model=ModelConfig(model=str(folder), device="cpu", dtype="float32"), **options),
    )
    build(config, out)
    return np.asarray(open_bank(out / "features").vectors(texts), np.float32)  # type: ignore[attr-defined]


def least_cosine(found: Vectors, wanted: Vectors) -> float:
    cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    return float(cosines.min())


def save(folder: Path, base: Path, *modules: Any, **options: Any) -> None:
    """Save with sentence-transformers: the transformer of `base`, and these modules."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keys = ("max_seq_length", "do_lower_case")
        transformer = Transformer(str(base), **{name: options.pop(name) for name in keys if name in options})
        SentenceTransformer(modules=[transformer, *modules], device="cpu", **options).save(str(folder))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_bert(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose tokenizer puts its end token behind a text, as Qwen3-Embedding's."""
    from tokenizers import Tokenizer, processors

    folder = tiny.save_qwen3(tmp_path_factory.mktemp("qwen") / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", pair="$A <|end|> $B <|end|>", special_tokens=[("<|end|>", end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def bert_folders() -> dict[str, Callable[[Path, Path], None]]:
    """Folders made of the tiny Bert."""
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
    from torch import nn

    def pooling(*modes: str, **options: Any) -> Any:
        return Pooling(32, pooling_mode=modes, **options)

    e5 = {"prompts": {"query": "query: ", "passage": "passage: "}}
    return {
        "mean": lambda folder, base: save(folder, base, pooling("mean"), Normalize()),
        "not normalized": lambda folder, base: save(folder, base, pooling("mean")),
        "cls, as bge": lambda folder, base: save(folder, base, pooling("cls"), Normalize(), **e5),
        "max": lambda folder, base: save(folder, base, pooling("max"), Normalize()),
        "mean of the root": lambda folder, base: save(folder, base, pooling("mean_sqrt_len_tokens")),
        "weighted mean": lambda folder, base: save(folder, base, pooling("weightedmean")),
        "last token": lambda folder, base: save(folder, base, pooling("lasttoken")),
        "two modes": lambda folder, base: save(folder, base, pooling("mean", "cls"), Normalize()),
        "all modes": lambda folder, base: save(folder, base, pooling(*Pooling.POOLING_MODES)),
        "a default prompt": lambda folder, base: save(folder, base, pooling("mean"), default_prompt_name="query", **e5),
        "a prompt that is not pooled": lambda folder, base: save(
            folder, base, pooling("mean", "weightedmean", include_prompt=False), default_prompt_name="query", **e5
        ),
        "max length": lambda folder, base: save(folder, base, pooling("mean"), max_seq_length=9),
        "dense": lambda folder, base: save(folder, base, pooling("mean"), Dense(32, 12), Normalize()),
        "two dense, as EmbeddingGemma": lambda folder, base: save(
            folder,
            base,
            pooling("mean"),
            Dense(32, 48, bias=False, activation_function=nn.Identity()),
            Dense(48, 32, bias=False, activation_function=nn.GELU()),
            Normalize(),
        ),
        "dense with a residual": lambda folder, base: save(folder, base, pooling("mean"), Dense(32, 16, use_residual=True)),
        "layer norm": lambda folder, base: save(folder, base, pooling("mean"), LayerNorm(32)),
        "normalized in between": lambda folder, base: save(folder, base, pooling("cls"), Normalize(), Dense(32, 8)),
    }


@pytest.mark.parametrize("name", BERTS)
def test_the_defaults_give_what_sentence_transformers_gives(name: str, bert: Path, tmp_path: Path) -> None:
    bert_folders()[name](tmp_path / "model", bert)
    found, wanted = built(tmp_path / "model", tmp_path / "bank"), real(tmp_path / "model", TEXTS)
    assert found.shape == wanted.shape
    assert least_cosine(found, wanted) >= LEAST


def test_a_decoder_that_pools_its_last_token(qwen: Path, tmp_path: Path) -> None:
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    save(tmp_path / "model", qwen, Pooling(32, pooling_mode="lasttoken"), Normalize(), prompts=prompts)
    assert least_cosine(built(tmp_path / "model", tmp_path / "bank"), real(tmp_path / "model", TEXTS)) >= LEAST
    with_prompt = built(tmp_path / "model", tmp_path / "prompted", tokens={"prompt": ("query",)})
    assert least_cosine(with_prompt, real(tmp_path / "model", TEXTS, prompt_name="query")) >= LEAST


def test_lower_case(qwen: Path, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    save(tmp_path / "model", qwen, Pooling(32), do_lower_case=True)
    found = built(tmp_path / "model", tmp_path / "bank")
    assert least_cosine(found, real(tmp_path / "model", TEXTS)) >= LEAST
    assert least_cosine(found, built(qwen, tmp_path / "plain", tokens={"special_tokens": "on"})) < LEAST


def test_the_layout_of_older_versions(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bert, folder / "0_Transformer")
    (folder / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": false}')
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    (folder / "2_Normalize").mkdir()
    kinds = [("Transformer", "0_Transformer"), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    steps = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(steps))
    (folder / "config_sentence_transformers.json").write_text('{"__version__": {"sentence_transformers": "2.0.0"}}')
    assert least_cosine(built(folder, tmp_path / "bank"), real(folder, TEXTS)) >= LEAST


def test_static_embeddings(bert: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bert / "tokenizer.json"))
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=24), Normalize()], device="cpu").save(
        str(tmp_path / "model")
    )
    assert least_cosine(built(tmp_path / "model", tmp_path / "bank"), real(tmp_path / "model", TEXTS)) >= LEAST


def test_a_folder_of_model2vec(bert: Path, tmp_path: Path) -> None:
    from model2vec import StaticModel
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bert / "tokenizer.json"))
    vectors = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), 20)).astype(np.float32)
    StaticModel(vectors, tokenizer, config={}).save_pretrained(str(tmp_path / "model"))
    wanted = StaticModel.from_pretrained(str(tmp_path / "model")).encode(TEXTS)
    assert least_cosine(built(tmp_path / "model", tmp_path / "bank"), wanted) >= LEAST


def test_encoders_get_their_special_tokens_and_plain_decoders_none(bert: Path, qwen: Path, wordpiece_tokenizer: Path) -> None:
    assert text_rules(str(bert)).special_tokens
    assert not text_rules(str(qwen)).special_tokens
    assert not text_rules(str(wordpiece_tokenizer)).special_tokens  # a tokenizer alone


def test_prompts_by_kind(bert: Path, tmp_path: Path) -> None:
    bert_folders()["cls, as bge"](tmp_path / "model", bert)
    source = tmp_path / "data.jsonl"
    source.write_text(json.dumps({"query": TEXTS[0], "candidates": [{"text": TEXTS[1]}, {"text": TEXTS[3]}]}) + "\n")
    words = ["build", "--source", f"train={source}", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "bank")]
    assert (
        main([*words, "--prompt", "query=query", "--prompt", "candidate=passage", "--device", "cpu", "--dtype", "float32"]) == 0
    )
    found = np.asarray(open_bank(tmp_path / "bank" / "features").vectors([TEXTS[0], TEXTS[1], TEXTS[3]]), np.float32)  # type: ignore[attr-defined]
    wanted = real(tmp_path / "model", [f"query: {TEXTS[0]}", f"passage: {TEXTS[1]}", f"passage: {TEXTS[3]}"])
    assert least_cosine(found, wanted) >= LEAST
    assert open_bank(tmp_path / "bank" / "features").manifest.json["prompts"]["candidate"] == "passage: "


def test_prompts_that_there_are_not(bert: Path, tmp_path: Path) -> None:
    bert_folders()["cls, as bge"](tmp_path / "model", bert)
    with pytest.raises(InputError, match=r"no prompt 'qurey'. Its prompts are document, passage, query"):
        built(tmp_path / "model", tmp_path / "bank", tokens={"prompt": ("qurey",)})
    with pytest.raises(InputError, match="no texts of kind 'passages'"):
        built(tmp_path / "model", tmp_path / "bank", tokens={"prompt": ("passages=passage",)})
    assert not (tmp_path / "bank").exists()


def test_unused_prompts_are_remarked_on(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert_folders()["cls, as bge"](tmp_path / "model", bert)
    source = tmp_path / "data.jsonl"
    source.write_text('{"query": "a text"}\n')
    words = ["build", "--source", f"train={source}", "--field", "query=query", "--model", str(tmp_path / "model")]
    assert main([*words, "--out", str(tmp_path / "bank")]) == 0
    said = capsys.readouterr().err
    assert "prompts that no text gets: passage, query" in said
    assert "special tokens on; prompt none; at most" in said
    assert "pooling cls; modules Normalize; normalized on; 32 dimensions; float32" in said


def test_tokens_that_were_made_otherwise_are_refused(bert: Path, tmp_path: Path) -> None:
    bert_folders()["a default prompt"](tmp_path / "model", bert)
    tiny.save_texts_bank(tmp_path / "texts", TEXTS)
    model = EncodeConfig(model=ModelConfig(model=str(tmp_path / "model"), device="cpu"))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"special_tokens": "off"}, "were made without special tokens, expected with"),
        ({"prompt": ("something: ",)}, "have the prompt 'something: '"),
        ({"max_tokens": 4}, "were cut to 4 a text"),
    ]
    for number, (options, words) in enumerate(cases):
        tokenize(TokenizeConfig(tokenizer=str(tmp_path / "model"), **options), tmp_path / "texts", tmp_path / f"tokens{number}")
        with pytest.raises(InputError, match=words):
            encode(model, tmp_path / f"tokens{number}", tmp_path / "bank")
        assert not (tmp_path / "bank").exists()
    taken = EncodeConfig(model=ModelConfig(model=str(tmp_path / "model"), device="cpu"), as_tokenized=True)
    assert encode(taken, tmp_path / "tokens0", tmp_path / "bank")["complete"]


def test_the_scale_of_the_folder_can_be_kept(bert: Path, tmp_path: Path) -> None:
    bert_folders()["not normalized"](tmp_path / "model", bert)
    found, wanted = built(tmp_path / "model", tmp_path / "bank", normalize=False), real(tmp_path / "model", TEXTS)
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_what_decides_the_vectors_is_in_the_fingerprint(bert: Path, tmp_path: Path) -> None:
    prints = set()
    for name, make in bert_folders().items():
        make(tmp_path / name, bert)
        prints.add(describe(ModelConfig(model=str(tmp_path / name), device="cpu")).fingerprint)
    assert len(prints) == len(bert_folders())
    from safetensors.numpy import load_file, save_file

    [weights] = (tmp_path / "dense").glob("*_Dense/model.safetensors")
    tensors = load_file(weights)
    tensors["linear.weight"] = -tensors["linear.weight"]
    save_file(tensors, weights)
    assert describe(ModelConfig(model=str(tmp_path / "dense"), device="cpu")).fingerprint not in prints


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        ("custom_st.Transformer", "code of the folder's own"),
        ("sentence_transformers.models.CNN", "lists CNN, which arrowbank does not apply"),
    ],
)
def test_modules_that_are_not_applied_are_refused(type_: str, words: str, bert: Path, tmp_path: Path) -> None:
    bert_folders()["mean"](tmp_path / "model", bert)
    steps = json.loads((tmp_path / "model" / "modules.json").read_text())
    steps.insert(1 if "CNN" in type_ else 0, {"idx": 9, "name": "9", "path": "", "type": type_})
    (tmp_path / "model" / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(InputError, match=words):
        built(tmp_path / "model", tmp_path / "bank")
    assert not (tmp_path / "bank").exists()
