"""From a ModelInfo to a torch module that maps token ids to hidden states.

"inner" takes the part that reads text: the model without its LM head, a vision-language wrapper's decoder (its vision tower is
let go), an encoder-decoder's encoder. "outer" keeps the whole model. Whatever of it will run must come from the
checkpoint: a weight that transformers had to make up is an error. Nothing here reads pickles or the network."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from arrowbank.errors import InputError
from arrowbank.models.describe import ModelInfo, read_config
from arrowbank.models.device import cap_memory, quiet, refusing
from arrowbank.models.layers import LayerReader
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


_PACKED_ROWS = 32
_PEFT = "base_model.model."  # before the names of an adapter's tensors

Reader = TypeVar("Reader", bound=nn.Module)


def load_hidden_states(config: ModelConfig, info: ModelInfo, device: torch.device) -> LayerReader:
    """The frozen model of `info` on `device`: a module from (N, T) int64 ids to (N, T, D) hidden states of `info.layer`.

    Raises InputError if it cannot be loaded whole, or not run.
    """
    return load_reader(config, info, device, lambda part: LayerReader(part, info, device))


def load_reader(config: ModelConfig, info: ModelInfo, device: torch.device, read: Callable[[Any], Reader]) -> Reader:
    """What `read` makes of the frozen model of `info` on `device`. Raises InputError if that cannot be loaded whole, or not run."""
    hf_config = read_config(info.folder, trust_remote_code=config.trust_remote_code)
    with refusing(lambda reason: f"model {info.model!r} cannot be loaded as {info.architecture}: {reason}"), quiet():
        try:
            part = _load(config, info, hf_config, device)
            part.eval().requires_grad_(False)
            part.config.use_cache = False
            return read(part).eval()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"model {info.model!r} does not fit on {device}: {error}\nUse --load-in-4bit, or raise --gpu-memory-gb."
            ) from error


def require_loadable(config: ModelConfig, info: ModelInfo) -> None:
    """Raise InputError where transformers cannot load the model of `info` whole. No value of a weight is read: transformers itself loads
    the model on torch's "meta" device, so the class, the names and the shapes are those of the real load. What is stored quantized is
    left to its own loader.
    """
    is_table = info.sentence is not None and info.sentence.static
    if not is_table and (info.quantisation is None or config.load_in_4bit):
        load_reader(config, info, torch.device("meta"), lambda part: part)


def empty_part(config: ModelConfig, info: ModelInfo) -> Any:
    """The part of the model of `info` that reads text, without weights: modules on the meta device."""
    hf_config = read_config(info.folder, trust_remote_code=config.trust_remote_code)
    remote = (getattr(hf_config, "auto_map", None) or {}) if config.trust_remote_code else {}
    model_class = _inner_class(info, remote)
    with torch.device("meta"), quiet():
        if hasattr(model_class, "from_config"):  # an auto class
            model = model_class.from_config(hf_config, trust_remote_code=config.trust_remote_code)
        else:
            model = model_class(hf_config)
    return _text_part(model, hf_config)


def widen_where_needed(reader: nn.Module, info: ModelInfo, device: torch.device) -> None:
    """Give a bfloat16 model on a CPU that lacks bfloat16 instructions its linear layers in float32 (see widened.py)."""
    if matmul_dtype(info, device) is not getattr(torch, info.dtype):
        widen_linears(reader)


def _load(config: ModelConfig, info: ModelInfo, hf_config: PretrainedConfig, device: torch.device) -> Any:
    """The part of the model that is to run, all of its weights from the checkpoint."""
    outer = info.backbone == "outer"
    remote = (getattr(hf_config, "auto_map", None) or {}) if config.trust_remote_code else {}
    model_class = _outer_class(info, remote) if outer else _inner_class(info, remote)
    with _bare(info) as folder:
        model, report = model_class.from_pretrained(
            folder,
            config=hf_config,
            dtype=getattr(torch, info.dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **_placement(config, info, device),
            **({} if outer else _without_pooler(model_class, hf_config)),
        )
    if info.adapter is not None:
        _apply_adapter(model, info.adapter)
    part = model if outer else _text_part(model, hf_config)
    if info.quantisation and device.type == "cpu":
        _spare_odd_shapes(part)
    _refuse_made_up_weights(model, part, report["missing_keys"], info)
    return part


@contextmanager
def _bare(info: ModelInfo) -> Iterator[Path]:
    """The folder of the weights without an adapter. Where both are in one folder, transformers would apply the adapter by itself,
    some kinds of them (DoRA) wrongly."""
    if info.adapter != info.folder:
        yield info.folder
        return
    with TemporaryDirectory() as bare:
        for path in info.folder.iterdir():
            if path.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                (Path(bare) / path.name).symlink_to(path.resolve())
        yield Path(bare)


def _apply_adapter(model: Any, folder: Path) -> None:
    """Put the adapter of `folder` into `model`, by peft. InputError where a tensor of it has no place in the model, or a place in the model
    has no tensor: peft would leave it out, or random.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    if config.is_prompt_learning:
        raise InputError(
            f"{folder}: an adapter of type {config.peft_type.value}, which adds tokens to a text. Give one that changes weights."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what it has renamed
        adapted = PeftModel(model, config)
        places = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        inner = f"{_PEFT}{model.base_model_prefix}."
        if any(name.startswith(inner) for name in tensors) and not any(name.startswith(inner) for name in places):
            # saved of the model with its head, which does not run
            tensors = {_PEFT + name.removeprefix(inner): value for name, value in tensors.items() if name.startswith(inner)}
        lost = set(tensors) - places - set(adapted.state_dict()), places - set(tensors)
        for names, what in zip(lost, ("have no place in the model", "are not in the file"), strict=True):
            if names:
                raise InputError(
                    f"{folder / ADAPTER_WEIGHTS}: {len(names)} tensors {what}, such as {min(names)}. Give the adapter of this model."
                )
        if next(model.parameters()).device.type != "meta":
            set_peft_model_state_dict(adapted, tensors)


def _outer_class(info: ModelInfo, remote: Collection[str]) -> Any:
    """The class that config.json names; `remote` are the auto classes that the folder's own code provides."""
    import transformers

    for name in ("AutoModelForCausalLM", "AutoModel"):
        if name in remote:
            return getattr(transformers, name)
    found = getattr(transformers, info.architecture, None)
    if found is None:
        raise InputError(f"config.json of {info.model!r} names {info.architecture!r}, which transformers does not have")
    return found


def _inner_class(info: ModelInfo, remote: Collection[str]) -> Any:
    """The class without a head: the checkpoint's own where it is one (it may be narrower than AutoModel's), else AutoModel."""
    import transformers

    if remote:
        return transformers.AutoModel if "AutoModel" in remote else transformers.AutoModelForCausalLM
    if info.architecture.endswith("Model") and hasattr(transformers, info.architecture):
        return getattr(transformers, info.architecture)
    return transformers.AutoModel


def _without_pooler(model_class: Any, hf_config: PretrainedConfig) -> dict[str, bool]:
    """BERT and its kin build a pooler over the first token, which no pooling here reads."""
    from transformers import MODEL_MAPPING

    concrete = MODEL_MAPPING.get(type(hf_config), None) if not hasattr(model_class, "forward") else model_class
    if isinstance(concrete, type) and "add_pooling_layer" in inspect.signature(concrete).parameters:
        return {"add_pooling_layer": False}
    return {}


def _placement(config: ModelConfig, info: ModelInfo, device: torch.device) -> dict[str, Any]:
    """from_pretrained's arguments for where weights go and how they are stored."""
    arguments: dict[str, Any] = {}
    if device.type == "meta":
        return {"device_map": "meta"}
    capped = device.type == "cuda" and config.gpu_memory_gb is not None
    if config.load_in_4bit:
        from transformers import BitsAndBytesConfig

        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=matmul_dtype(info, device),
            llm_int8_enable_fp32_cpu_offload=capped,
        )
    if capped and config.gpu_memory_gb is not None:
        arguments |= {"device_map": "auto", "max_memory": cap_memory(device, config.gpu_memory_gb)}
    elif device.type == "cuda" or info.quantisation:
        arguments["device_map"] = {"": str(device)}
    return arguments


def matmul_dtype(info: ModelInfo, device: torch.device) -> torch.dtype:
    """What matrix products compute in: the model's dtype, but float32 for bfloat16 on a CPU that lacks it (see widened.py)."""
    dtype: torch.dtype = getattr(torch, info.dtype)
    return torch.float32 if device.type == "cpu" and dtype is torch.bfloat16 and not cpu_has_bfloat16() else dtype


def _spare_odd_shapes(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking, for CPUs with bfloat16, 4-bit weights whose shape its packed layout cannot hold."""
    module: Any
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            rows, columns = module.out_features, module.in_features
            module.support_avx512bf16_for_cpu = not (rows % _PACKED_ROWS or columns % module.weight.blocksize)


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; True where torch does not tell (not an x86)."""
    if not hasattr(torch.cpu, "get_capabilities"):  # before torch 2.12
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    found = torch.cpu.get_capabilities()
    if found.get("architecture") != "x86_64":
        return True
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _text_part(model: Any, hf_config: PretrainedConfig) -> Any:
    """The module inside `model` that reads token ids and gives hidden states."""
    narrow = hf_config.is_encoder_decoder or type(model).__name__.endswith("EncoderModel")
    return model.get_encoder() if narrow else model.get_decoder()


def _refuse_made_up_weights(model: nn.Module, part: nn.Module, missing: Any, info: ModelInfo) -> None:
    """Raise InputError if a weight of the part that runs was not in the checkpoint; a pooler's value is never used."""
    prefix = next(name for name, module in model.named_modules() if module is part)
    inside = sorted(key for key in missing if key.startswith(f"{prefix}." if prefix else "") and "pooler" not in key.split("."))
    if inside:
        shown = ", ".join(inside[:4]) + (f" and {len(inside) - 4} more" if len(inside) > 4 else "")
        raise InputError(
            f"model {info.model!r}: {len(inside)} weights that {type(part).__name__} needs are not in its checkpoint and would "
            f"be random: {shown}\nThe files are not of this architecture, or the model was exported without them."
        )


class WidenedLinear(nn.Module):
    """`linear`, a bfloat16 nn.Linear, with its weights kept in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.dtype = linear.weight.dtype
        self.weight = nn.Parameter(linear.weight.detach().float(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), self.weight, self.bias).to(self.dtype)


def widen_linears(model: nn.Module) -> None:
    """Replace every plain bfloat16 nn.Linear of `model` in place; subclasses (quantised ones, say) are left alone."""
    for name, child in model.named_children():
        if type(child) is nn.Linear and child.weight.dtype is torch.bfloat16:
            setattr(model, name, WidenedLinear(child))
        else:
            widen_linears(child)
