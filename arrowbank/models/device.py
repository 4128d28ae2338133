"""Which device a model runs on, and the cap on its memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from arrowbank.errors import ArrowbankError, InputError
from arrowbank.models.model_config import ModelConfig

if TYPE_CHECKING:
    import torch


# Of a memory cap, what weights may take; the rest is for activations, the CUDA context's workspaces and fragmentation.
_WEIGHTS_SHARE = 0.75


def resolve_device(config: ModelConfig, worker: int = 0) -> tuple[str, int, tuple[str, ...]]:
    """("cpu" or "cuda:N", how many workers can have a device of their own, notes for a person).

    Worker i of several takes GPU i modulo their count, unless the device is named.
    Raises InputError for a GPU that is not there.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device.startswith("cuda"):
        index = int(config.device[5:]) if ":" in config.device else worker % max(count, 1)
        if not count:
            raise InputError(
                f"device is {config.device!r}, but torch {torch.__version__} finds no CUDA GPU here; use --device cpu, or "
                "install a driver and a CUDA build of torch"
            )
        if index >= count:
            raise InputError(f"device is {config.device!r}, but this machine has {count} GPU(s), cuda:0 to cuda:{count - 1}")
        return f"cuda:{index}", 1 if ":" in config.device else count, ()
    if config.device == "auto" and count:
        return f"cuda:{worker % count}", count, ()
    if config.gpu_memory_gb is not None:
        return "cpu", 1, (f"gpu_memory_gb = {config.gpu_memory_gb:g} has no effect: the model runs on the CPU",)
    return "cpu", 1, ()


def cap_memory(device: torch.device, gpu_memory_gb: float) -> dict[int | str, int]:
    """Cap this process's share of the GPU for good, and say how much of it (and of the CPU's) the weights may take.

    Allocating beyond the cap raises torch.OutOfMemoryError instead of taking memory from others on the same GPU.
    """
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    cap = gpu_memory_gb * 2**30
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
    index = device.index or 0
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {index: int(min(cap, total) * _WEIGHTS_SHARE), "cpu": host}


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines below errors and no progress bars from transformers inside the block; the settings are put back."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def refusing(explain: Callable[[str], str]) -> Iterator[None]:
    """Whatever a library raises inside the block is an InputError, whose message `explain` makes of the library's reason.

    So is a panic of a library in Rust, which is no Exception and has no class to import."""
    try:
        yield
    except ArrowbankError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(explain(str(error).strip() or repr(error))) from error
