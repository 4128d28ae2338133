"""What a ModelConfig comes to on this machine, found from config.json and the weights' headers: no weight is loaded.

The plan of a bank needs it first: the width of a row, and `recipe()`, everything of the model that decides values. The device
is not in the recipe: a GPU and a CPU differ in last bits but make the same bank.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arrowbank.errors import InputError
from arrowbank.models.device import quiet, refusing, resolve_device
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.model_folder import (
    ADAPTER_CONFIG,
    adapted_fingerprint,
    adapter_files,
    base_folder,
    model_fingerprint,
    read_json,
    resolve_model,
    weight_files,
)
from arrowbank.models.pooling import folder_pooling, require_no_projection

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Bump when the forward pass or the pooling changes so that the same model and ids give other bits.
FORWARD_VERSION = 1

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
    notes: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the model's files; computed when first asked for, since it reads all of them."""
        base = model_fingerprint(self.folder, code=self.code)
        return base if self.adapter is None else adapted_fingerprint(base, self.adapter, adapter_files(self.adapter))

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
            **({} if self.adapter is None else {"adapter": read_json(self.adapter / ADAPTER_CONFIG).get("peft_type")}),
        }


def describe(config: ModelConfig) -> ModelInfo:
    """Resolve `config`; downloads the model if it is a Hub id. Raises InputError for whatever cannot be used."""
    folder = resolve_model(config.model, code=config.trust_remote_code)
    with refusing(lambda reason: f"model {config.model!r} is not usable: {reason}. Check its config.json."):
        return _described(config, folder)


def _described(config: ModelConfig, given: Path) -> ModelInfo:
    if config.pooling == "none":
        require_no_projection(given)
    adapter, folder = _adapter(given), base_folder(given, code=config.trust_remote_code)
    device, devices, notes = resolve_device(config)
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
    return ModelInfo(
        model=config.model,
        folder=folder,
        architecture=(hf_config.architectures or [type(hf_config).__name__])[0],
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_size=vocab_size,
        max_positions=_max_positions(text_config),
        pooling=folder_pooling(given) if config.pooling == "auto" else config.pooling,
        layer=_layer(config.layer, num_layers, config.model),
        backbone=config.backbone,
        dtype=dtype,
        quantisation=_quantisation(config, hf_config),
        device=device,
        devices=devices,
        code=config.trust_remote_code,
        adapter=adapter,
        notes=(*notes, *dtype_notes),
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
