"""What a user asks of a model, before anything is looked at. Checked without I/O; what it comes to is `describe`'s answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from arrowbank.errors import InputError
from arrowbank.settings import EXECUTION, Flag, Help, Place, Positive, Settings, refuse_unread

Pooling = Literal["auto", "mean", "last", "cls", "max", "none"]
Backbone = Literal["inner", "outer"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


Device = Annotated[str, Help("auto (a GPU if there is one), cpu, cuda, cuda:1 …", default="auto"), EXECUTION]
GpuMemory = Annotated[
    Positive,
    Help("Hard cap in GiB of its GPU; the rest runs from the CPU."),
    EXECUTION,
]
TrustRemoteCode = Annotated[bool, Help("Run the model's own code; only if you have read it.")]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """The model and how to run it. Raises InputError for a value that no model could take.

    `layer` counts `hidden_states` as transformers does. `backbone` "inner" is the decoder or encoder alone.
    """

    model: Annotated[Place, Help("A folder or hub name; safetensors only.", "M")]
    pooling: Annotated[Pooling, Help("auto: the folder's own, else mean; none: a vector per token.")] = "auto"
    layer: Annotated[int, Help("Hidden state to pool: 0 embeddings, -1 the last.")] = -1
    backbone: Annotated[Backbone, Help("Without or with the LM head.")] = "inner"
    dtype: Annotated[Dtype, Help("While it runs; auto: the checkpoint's own.")] = "auto"
    load_in_4bit: Annotated[bool, Flag("--load-in-4bit"), Help("Quantize linear layers to bitsandbytes NF4 when loading.")] = (
        False
    )
    gpu_memory_gb: GpuMemory | None = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False

    def check(self) -> None:
        if not self.model:
            raise InputError("model is empty; expected a folder or a Hugging Face Hub id")
        if not _DEVICE.fullmatch(self.device):
            raise InputError(f"device is {self.device!r}; expected auto, cpu, cuda or cuda:N")
        if self.device == "cpu":
            refuse_unread("--device cpu", self, ["gpu_memory_gb"])
