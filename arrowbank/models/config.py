"""What a user asks of a model, before anything is looked at. Checked without I/O; what it comes to is `describe`'s answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from arrowbank.errors import InputError
from arrowbank.settings import Place, Positive, Settings, refuse_unread

Pooling = Literal["auto", "mean", "last", "cls", "max"]
Backbone = Literal["inner", "outer"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """The model and how to run it. Raises InputError for a value that no model could take.

    model               a local folder or a Hugging Face Hub id: the string as given
    pooling             how T hidden states become one vector; "auto": what a sentence-transformers folder says, else the mean
    layer               index into `hidden_states` as transformers counts: 0 the embeddings, -1 the last, after the final norm
    backbone            "inner": the decoder or encoder alone; "outer": the whole model with its head
    dtype               "auto": the checkpoint's own
    load_in_4bit        quantise the linear layers to NF4 with bitsandbytes while loading
    gpu_memory_gb       a hard cap, in GiB, on this process's share of its GPU; weights that do not fit stay on the CPU
    device              "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N"
    trust_remote_code   run Python code that lies beside the weights; only for models whose code you have read
    """

    model: Place
    pooling: Pooling = "auto"
    layer: int = -1
    backbone: Backbone = "inner"
    dtype: Dtype = "auto"
    load_in_4bit: bool = False
    gpu_memory_gb: Positive | None = None
    device: str = "auto"
    trust_remote_code: bool = False

    def check(self) -> None:
        if not self.model:
            raise InputError("model is empty; expected a folder or a Hugging Face Hub id")
        if not _DEVICE.fullmatch(self.device):
            raise InputError(f"device is {self.device!r}; expected auto, cpu, cuda or cuda:N")
        if self.device == "cpu":
            refuse_unread("--device cpu", self, ["gpu_memory_gb"])
