"""What a ModelConfig comes to on this machine, found from config.json and the weights' headers: no weight is loaded.

The plan of a bank needs it first: the width of a row, and `recipe()`, everything of the model that decides values. The device
is not in the recipe: a GPU and a CPU differ in last bits but make the same bank.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arrowbank.errors import InputError
from arrowbank.models.device import quiet, refusing, resolve_device
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.model_folder import (
    ADAPTER_CONFIG,
    MODULES,
    SINGLE,
    adapted_fingerprint,
    adapter_files,
    base_folder,
    files_digest,
    model_fingerprint,
    read_json,
    resolve_model,
    transformer_folder,
    weight_files,
)
from arrowbank.models.sentence_folder import SentenceFolder, read_sentence_folder, static_table

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Bump when the forward pass or the pooling changes so that the same model and ids give other bits.
FORWARD_VERSION = 2

MODEL2VEC_TOKENS = 512  # what its encode() cuts texts to
NF4 = {"method": "bitsandbytes", "bits": 4, "type": "nf4", "double_quant": True}

# These embed positions from pad_token_id + 1 on, so their table holds that many fewer than it has rows.
_OFFSET_BY_PAD = (
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "longformer", "luke", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model resolved against its folder and this machine.

    layer is counted from 0 (the embeddings) to num_layers (the last, after the final norm); max_positions is None where the
    model sets no limit; quantisation is None for plain weights; devices is how many workers can have one of their own (1 on
    a CPU); code tells whether Python files beside the weights are run; adapter is the folder of one that peft applies, else None;
    notes are lines a person should see.
    """

    model: str
    folder: Path
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_positions: int | None
    pooling: str
    layer: int
    backbone: str
    dtype: str
    quantisation: dict[str, Any] | None
    device: str
    devices: int
    code: bool = False
    adapter: Path | None = None
    sentence: SentenceFolder | None = None
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The numbers of a vector: of the pooled hidden states, or of what the folder's modules make of them."""
        pooled = self.hidden_size * (self.pooling.count("+") + 1)
        return pooled if self.sentence is None else self.sentence.width(pooled)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the model's files; computed when first asked for, since it reads all of them."""
        is_table = self.sentence is not None and self.sentence.static
        base = files_digest(self.folder, [self.folder / SINGLE]) if is_table else model_fingerprint(self.folder, code=self.code)
        if self.adapter is not None:
            base = adapted_fingerprint(base, self.adapter, adapter_files(self.adapter))
        return base if self.sentence is None else hashlib.sha256(f"{base}\n{self.sentence.digest}".encode()).hexdigest()

    def recipe(self) -> dict[str, Any]:
        """JSON-able: all of the model that decides a bank's values; neither path, device nor time."""
        return {
            "model_sha256": self.fingerprint,
            "architecture": self.architecture,
            "hidden_size": self.hidden_size,
            "backbone": self.backbone,
            "layer": self.layer,
            "pooling": self.pooling,
            "dtype": self.dtype,
            "quantisation": self.quantisation,
            "forward_version": FORWARD_VERSION,
            **({} if self.sentence is None else {"modules": self.sentence.named_modules, "width": self.width}),
            **({} if self.adapter is None else {"adapter": read_json(self.adapter / ADAPTER_CONFIG).get("peft_type")}),
        }


DEFAULT_TOKENS = 256  # of a text, where the model's folder says nothing


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What a model's folder asks of texts. `max_tokens` is None where it sets no limit; `prompts` are by name, `default_prompt` is what is
    put before a text where nobody asks for another one. `sentence` tells whether sentence-transformers saved the folder."""

    special_tokens: bool
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    include_prompt: bool = True
    sentence: bool = False


def text_rules(model: str, *, trust_remote_code: bool = False) -> TextRules:
    """What the folder of `model` asks of texts: as sentence-transformers would take them where it saved the folder; otherwise whether the
    tokenizer's special tokens are added, as encoders were trained and plain decoders were not. InputError for a folder that cannot be read.
    """
    folder = resolve_model(model, weights=False, code=trust_remote_code)
    sentence = read_sentence_folder(folder, per_token=None)
    if sentence is not None and sentence.static:
        tokens = None if (folder / MODULES).is_file() else MODEL2VEC_TOKENS
        return TextRules(
            special_tokens=False,
            max_tokens=tokens,
            prompts=sentence.prompts,
            default_prompt=sentence.default_prompt,
            sentence=True,
        )
    inner = base_folder(folder, code=trust_remote_code)
    if not (inner / "config.json").is_file():  # a tokenizer alone
        return TextRules(special_tokens=False)
    hf_config = read_config(inner, trust_remote_code=trust_remote_code)
    if sentence is None:
        return TextRules(special_tokens=_is_encoder(hf_config))
    limits = [sentence.max_seq_length, _max_positions(text_part(hf_config))]
    known = [limit for limit in limits if limit is not None]
    return TextRules(
        special_tokens=True,
        max_tokens=min(known) if known else None,
        prompts=sentence.prompts,
        default_prompt=sentence.default_prompt,
        include_prompt=sentence.include_prompt,
        sentence=True,
    )


def _is_encoder(hf_config: PretrainedConfig) -> bool:
    """Whether texts are read in both directions: not a decoder alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

    names = hf_config.architectures or []
    if hf_config.is_encoder_decoder:
        return True
    if getattr(hf_config, "is_decoder", False) or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return False
    kind = hf_config.model_type
    return kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def describe(config: ModelConfig) -> ModelInfo:
    """Resolve `config`; downloads the model if it is a Hub id. Raises InputError for whatever cannot be used."""
    folder = resolve_model(config.model, code=config.trust_remote_code)
    with refusing(lambda reason: f"model {config.model!r} is not usable: {reason}. Check its config.json."):
        return _described(config, folder)


def _described(config: ModelConfig, given: Path) -> ModelInfo:
    per_token = config.pooling == "none"
    sentence = read_sentence_folder(given, per_token=per_token) if per_token or config.pooling == "auto" else None
    if per_token and sentence is not None and not sentence.heads and not sentence.static:
        sentence = None  # the vectors of tokens are the hidden states
    device, devices, notes = resolve_device(config)
    if sentence is not None and sentence.static:
        return _described_table(config, sentence)
    adapter, folder = _adapter(transformer_folder(given)), base_folder(given, code=config.trust_remote_code)
    hf_config = read_config(folder, trust_remote_code=config.trust_remote_code)
    if config.backbone == "outer" and hf_config.is_encoder_decoder:
        raise InputError(
            f"model {config.model!r} has an encoder and a decoder, and only its encoder is run; use --backbone inner"
        )
    text_config = text_part(hf_config)
    hidden_size, num_layers, vocab_size = (
        _number(text_config, name, folder) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    dtype, dtype_notes = _dtype(config.dtype, hf_config, folder, device)
    layer = _layer(config.layer, num_layers, config.model)
    if sentence is not None and sentence.heads and layer != num_layers:
        raise InputError(
            f"--layer {config.layer}: the modules of {config.model!r} ({', '.join(sentence.named_modules)}) are for its last layer; name a "
            "--pooling to have the pooled hidden states of another one without them"
        )
    return ModelInfo(
        model=config.model,
        folder=folder,
        architecture=(hf_config.architectures or [type(hf_config).__name__])[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        max_positions=_max_positions(text_config),
        pooling=config.pooling if config.pooling != "auto" else sentence.pooling if sentence else "mean",
        layer=layer,
        backbone=config.backbone,
        dtype=dtype,
        quantisation=_quantisation(config, hf_config),
        device=device,
        devices=devices,
        code=config.trust_remote_code,
        adapter=adapter,
        sentence=sentence,
        notes=(*notes, *dtype_notes),
    )


def _described_table(config: ModelConfig, sentence: SentenceFolder) -> ModelInfo:
    """A table of a vector a token: no layer, no dtype of its own, and quick enough on a CPU."""
    table = static_table(sentence.transformer)
    given = {"layer": -1, "backbone": "inner", "load_in_4bit": False}
    if config.pooling == "none":
        raise InputError(
            f"--pooling none: {config.model!r} is a table, whose vectors of tokens are the same in every text. Leave it out."
        )
    for name, default in given.items():
        if getattr(config, name) != default:
            raise InputError(
                f"--{name.replace('_', '-')}: {config.model!r} is a table of a vector a token, without layers. Leave it out."
            )
    return ModelInfo(
        model=config.model,
        folder=sentence.transformer,
        architecture="StaticEmbedding",
        hidden_size=table.width,
        num_layers=0,
        vocab_size=table.rows,
        max_positions=None,
        pooling="mean",
        layer=0,
        backbone="inner",
        dtype="float32",
        quantisation=None,
        device="cpu",
        devices=1,
        sentence=sentence,
    )


def _adapter(folder: Path) -> Path | None:
    """`folder` where it holds an adapter. InputError where peft, which applies it, is not installed."""
    if not adapter_files(folder):
        return None
    if find_spec("peft") is None:
        raise InputError(
            f"{folder}: holds an adapter ({ADAPTER_CONFIG}), which peft applies, and peft is not installed. Without it the vectors would "
            "be the base model's. Run pip install 'arrowbank[peft]', or take the adapter out of the folder."
        )
    return folder


def read_config(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """transformers' config of the model in `folder`."""
    from transformers import AutoConfig

    def explain(reason: str) -> str:
        if "trust_remote_code" in reason:
            reason += "\nIf you have read its code and trust it, allow it with --trust-remote-code."
        return f"{folder / 'config.json'} is not a model that transformers can build: {reason}"

    with refusing(explain), quiet():
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)


def text_part(hf_config: PretrainedConfig) -> PretrainedConfig:
    """The config of the part that reads text: itself, a vision-language model's decoder, an encoder-decoder's encoder."""
    try:
        if not hf_config.is_encoder_decoder:
            return hf_config.get_text_config()
        encoder = getattr(hf_config, "encoder", None)
        return hf_config.get_text_config(encoder=True) if encoder is None else encoder.get_text_config()
    except ValueError as error:
        raise InputError(
            f"model of type {hf_config.model_type!r}: which part of it reads text is not clear: {error}"
        ) from error


def _number(text_config: PretrainedConfig, name: str, folder: Path) -> int:
    value = getattr(text_config, name, None)
    if not isinstance(value, int):
        raise InputError(f"{folder / 'config.json'} has {name} = {value!r}; expected an integer: is this a text model?")
    return value


def _layer(layer: int, num_layers: int, model: str) -> int:
    if not -num_layers - 1 <= layer <= num_layers:
        raise InputError(
            f"layer is {layer}, but {model!r} has {num_layers} layers; expected 0 (the embeddings) to {num_layers} (the last), "
            f"or -1 to {-num_layers - 1} counted from the end"
        )
    return layer if layer >= 0 else num_layers + 1 + layer


def _max_positions(text_config: PretrainedConfig) -> int | None:
    limit = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    if text_config.model_type in _OFFSET_BY_PAD:
        return limit - (getattr(text_config, "pad_token_id", None) or 0) - 1
    return limit


def _dtype(asked: str, hf_config: PretrainedConfig, folder: Path, device: str) -> tuple[str, tuple[str, ...]]:
    dtype = _checkpoint_dtype(hf_config, folder) if asked == "auto" else asked
    if dtype == "float16" and device == "cpu":
        return "float32", ("float16 on a CPU is about a hundred times slower than float32: computing in float32",)
    return dtype, ()


def _checkpoint_dtype(hf_config: PretrainedConfig, folder: Path) -> str:
    """The config's dtype; where it names none, the one that most of the stored floating-point values have."""
    declared = getattr(hf_config, "dtype", None) or getattr(text_part(hf_config), "dtype", None)
    if declared is not None:
        name = str(declared).removeprefix("torch.")
        return name if name in ("float32", "bfloat16", "float16") else "float32"
    from safetensors import SafetensorError, safe_open

    count = dict.fromkeys(_FLOATS, 0)
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a dict)
                    part = tensors.get_slice(name)
                    if part.get_dtype() in count:
                        count[part.get_dtype()] += math.prod(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is not a whole safetensors file: {error}; download or copy it again") from error
    return _FLOATS[max(count, key=count.__getitem__)] if any(count.values()) else "float32"


def _quantisation(config: ModelConfig, hf_config: PretrainedConfig) -> dict[str, Any] | None:
    stored = getattr(hf_config, "quantization_config", None)
    if stored is None:
        return dict(NF4) if config.load_in_4bit else None
    stored = dict(stored) if isinstance(stored, dict) else stored.to_dict()
    if config.load_in_4bit:
        method = stored.get("quant_method", "by an unknown method")
        raise InputError(f"model {config.model!r} is already quantised ({method}); load it without --load-in-4bit")
    return dict(json.loads(json.dumps(stored, sort_keys=True, default=str)))
