"""Tiny but real tokenizers and models, made in this process: no download, no mock.

Two tokenizers, because stages must hold for both families: a byte-level BPE as decoders have it (no special tokens of
its own), and a WordPiece as encoders have it (`[CLS]` and `[SEP]` from a post-processor, control characters dropped, so that
a text can tokenize to nothing).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SENTENCES = (
    "The bank lies on disk as a folder of Arrow shards.",
    "A shard is a contiguous range of rows, encoded in order of length.",
    "Return the number of bytes read, or raise an error at the end of the file.",
    "Open the file and close it again when the block is left.",
    "Parse a date from text such as 2024-02-29 and give it back as three numbers.",
    "A query goes in and its nearest candidates come out, best first.",
    "Numbers, commas, quotation marks and brackets (like these) are words of their own.",
    "Nothing is ever overwritten silently; a crash loses the shard in hand and no more.",
    "def mean(values): return sum(values) / len(values)",
    "Grüße aus Köln, und ein Café für Zoë.",
    "The lock names its holder, so that a second writer knows whom to wait for.",
    "Sorting by length makes full batches, and rows go back to their places afterwards.",
    "Words are counted, merged and counted again until the vocabulary is full.",
    "the a an of to in on at by for from with without and or not is are was were be been it this that these those",
)


# ChatML, as Qwen's models have it, once with and once without the marks of what the assistant says
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def texts(count: int) -> list[str]:
    """`count` different texts of very different lengths, the same ones each time."""
    words = " ".join(SENTENCES).split()
    picks = ([words[(7 * i + j * (1 + i % 5)) % len(words)] for j in range(1 + (i * i) % 37)] for i in range(count))
    return [" ".join([*pick, str(i)]) for i, pick in enumerate(picks)]


def save_texts_bank(folder: Path, texts: Sequence[str], generations: Sequence[int] | None = None) -> Path:
    """A committed texts bank of `texts`, as `scan` writes it: one shard a generation (cumulative row ends, as after growth)."""
    import pyarrow as pa

    from arrowbank.bank import BankWriter

    ends = list(generations or [len(texts)])
    digest = hashlib.sha256("\n".join(texts).encode("utf-8", "replace")).hexdigest()
    with BankWriter(folder, kind="texts", recipe={"texts": digest, "generations": ends}) as bank:
        for index, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
            rows = texts[start:stop]
            columns = {
                "text": pa.array(rows, pa.large_string()),
                "sha1": pa.array([hashlib.sha1(text.encode()).digest() for text in rows], pa.binary()),
                "kind": pa.array(["query"] * len(rows), pa.string()),
                "source": pa.array(["train"] * len(rows), pa.string()),
            }
            bank.write_shard(index, pa.record_batch(columns))
        fields = {
            "generations": ends,
            "sources": [{"name": "train", "file": "train.jsonl", "bytes": 0, "sha256": digest}],
            "train_sha256": digest,
            "kinds": {"query": len(texts), "candidate": 0},
            "text_count": len(texts),
        }
        bank.commit(rows=len(texts), manifest=fields)
    return folder


def conversations(count: int) -> list[dict[str, Any]]:
    """`count` different conversations of one to three answers, the same ones each time."""
    said = iter(texts(6 * count))
    return [
        {
            "id": f"chat-{i}",
            "messages": [{"role": role, "content": next(said)} for _ in range(1 + i % 3) for role in ("user", "assistant")],
        }
        for i in range(count)
    ]


def capture_command(model: Path, rows: Path, out: Path) -> list[str]:
    """The command line that captures block 1 of a model."""
    return ["targets", "capture", "--model", str(model), "--source", str(rows), "--layers", "1", "--out", str(out)]


def save_bpe_tokenizer(folder: Path, **options: Any) -> Path:
    """A byte-level BPE tokenizer of about 500 ids without a post-processor, as Qwen's, saved for `from_pretrained`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _save(tokenizer, folder, {"eos_token": "<|end|>", "pad_token": "<|end|>"} | options)


def save_wordpiece_tokenizer(folder: Path, **options: Any) -> Path:
    """A WordPiece tokenizer of about 400 ids that puts `[CLS]` and `[SEP]` around a text when asked to, as Bert's."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return _save(tokenizer, folder, names | options)


def save_qwen3(folder: Path, *, hidden_size: int = 32, layers: int = 2, chat_template: str | None = None) -> Path:
    """A random Qwen3 decoder with the BPE tokenizer beside it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    save_bpe_tokenizer(folder, **({"chat_template": chat_template} if chat_template else {}))
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return _save_model(Qwen3ForCausalLM, config, folder)


def save_bert(folder: Path, *, hidden_size: int = 32, layers: int = 2) -> Path:
    """A random Bert encoder with the WordPiece tokenizer beside it."""
    from transformers import BertConfig, BertModel

    save_wordpiece_tokenizer(folder)
    config = BertConfig(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return _save_model(BertModel, config, folder)


def _save(tokenizer: Any, folder: Path, options: dict[str, Any]) -> Path:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(str(folder))
    return folder


def _save_model(kind: Any, config: Any, folder: Path) -> Path:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind(config).eval().save_pretrained(str(folder))
    return folder
