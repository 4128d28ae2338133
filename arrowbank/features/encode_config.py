"""What decides a feature bank."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt

from arrowbank.bank.checks import reason
from arrowbank.engine.plan import SHARD_ROWS, BatchRules
from arrowbank.errors import ArrowbankError, InputError
from arrowbank.models.model_config import ModelConfig
from arrowbank.models.vllm_engine import EngineConfig
from arrowbank.models.vllm_runner import Runner, check_runner
from arrowbank.settings import (
    EXECUTION,
    Cosine,
    Count,
    Flag,
    Help,
    Natural,
    Old,
    Part,
    Place,
    Settings,
    refuse_unread,
    require_one,
)

# Raise this by one whenever the same tokens and weights would give other vectors: batching, pooling, normalising, rounding.
# It is part of the plan digest, so no bank is ever finished by a method other than the one that began it.
ENCODING_METHOD = 2

DRIFT_SAMPLE = 64
# Lowest cosines to MiniLM's float32 vectors over 64 texts: bfloat16 0.99994, weights rounded to 8 bits 0.9991, to 4 bits 0.83,
# another pooling or layer below 0.3. So the bound lets through what rounding does, and nothing else: another device or library
# version passes, another model or a quantisation that nobody declared does not.
MIN_COSINE = 0.999


def on_or_off(text: str) -> bool:
    """The value of an option that is on or off."""
    if text not in ("on", "off"):
        raise InputError(f"--normalize {text}: expected on or off.")
    return text == "on"


class Encoder(Protocol):
    """A frozen model that turns tokens into one vector a row."""

    hidden_size: int

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Pooled vectors, [N, D] float32, not normalised, of N rows of exactly T tokens."""


class OwnEncoder(Encoder, Protocol):
    """An encoder of the user's own, which says which version it is."""

    version: object


@dataclass(frozen=True, kw_only=True)
class EncodeConfig(Settings):
    """Everything that decides the vectors, together with the token bank.

    Exactly one of `model` (transformers) and `encoder` ("package.module:factory", a callable without arguments that returns an Encoder
    with a `version`) is given.
    """

    model: ModelConfig | None = None
    encoder: Annotated[str, Help("An encoder of your own instead of --model.", "MODULE:FACTORY")] | None = None
    runner: Runner = "transformers"
    engine: Annotated[EngineConfig, Part(without=("vllm_url",))] = field(default_factory=EngineConfig)
    rules: BatchRules = field(default_factory=BatchRules)
    normalize: Annotated[
        bool,
        Flag("--normalize"),
        Help("off: keep the model's own scale.", "on|off", default="on", read=on_or_off),
        Old("--no-normalize", value="off"),
    ] = True
    dim: Annotated[Count, Help("The first N dimensions, normalized again.")] | None = None
    shard_rows: Annotated[Count, Help("Rows per shard (at most 1 GiB of vectors).")] = SHARD_ROWS
    limit: Annotated[Count, Help("Only the first N rows.")] | None = None
    trial: Annotated[Count, Help("Encode N rows to try it; the bank is never committed.")] | None = None
    mirror: Annotated[bool, Help("Leave out the .npy, index.json and texts.jsonl.")] = True
    as_tokenized: Annotated[bool, Help("Take tokens that were made otherwise than the model's folder asks for.")] = False
    onto: Annotated[Place, Help("A feature bank of the first rows: its shards are taken over.", "DIR")] | None = None
    drift_sample: (
        Annotated[Natural, Help("With --onto: old texts encoded again first; 0: none.", default="64"), EXECUTION] | None
    ) = None
    min_cosine: (
        Annotated[Cosine, Help("With --onto: their least cosine to the old ones.", default="0.999"), EXECUTION] | None
    ) = None

    def check(self) -> None:
        require_one(self, ("model", "encoder"))
        check_runner(self.runner, self.engine, self.model, self.rules)
        if self.onto is not None and (self.limit is not None or self.trial is not None):
            raise InputError("--onto is for a bank that grows by all unseen texts: leave out --limit and --trial.")
        if self.per_token:
            refuse_unread("--pooling none", self, ["mirror", "onto"])
        if self.drift_sample == 0:
            refuse_unread("--drift-sample 0", self, ["min_cosine"])

    @property
    def per_token(self) -> bool:
        """Whether a vector is stored for every token of a text, and none for the text."""
        return self.model is not None and self.model.pooling == "none"

    @property
    def model_path(self) -> str:
        """The model as the user named it."""
        return self.model.model if self.model else str(self.encoder)


def width_of(config: EncodeConfig, hidden_size: int) -> int:
    """How many numbers a stored vector has, of a model that gives `hidden_size`. InputError where it gives fewer than are wanted."""
    if config.dim is not None and config.dim > hidden_size:
        raise InputError(
            f"--dim {config.dim}: {config.model_path!r} gives vectors of {hidden_size} dimensions. Give at most as many."
        )
    return config.dim or hidden_size


def check_growth(config: EncodeConfig, *, grows: bool) -> None:
    """InputError for an option that is only for a bank that grows, where this one does not."""
    if not grows:
        refuse_unread("a bank that does not grow (no --onto)", config, ["drift_sample", "min_cosine"])


@lru_cache(maxsize=1)
def load_custom_encoder(spec: str) -> OwnEncoder:
    """The user's own encoder, from "package.module:factory". InputError when it is not one.

    A process makes it once: the plan asks it for its width and version, then the worker encodes with it.
    """
    module_name, _, factory_name = spec.partition(":")
    try:
        factory: Any = importlib.import_module(module_name)
        for part in factory_name.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise InputError(
            f"--encoder {spec}: cannot be imported ({error}). Give package.module:factory, importable from here "
            "(set PYTHONPATH if it is not installed)."
        ) from None
    if not _takes_no_arguments(factory):
        raise InputError(f"--encoder {spec}: cannot be called without arguments. Give a class or function that can.")
    with _named(spec):
        encoder = factory()
    for attribute, meaning in (("hidden_size", "D, the width of a vector"), ("version", "named in the plan digest")):
        if not hasattr(encoder, attribute):
            raise InputError(f"--encoder {spec}: has no attribute {attribute} ({meaning}). Add it.")
    return _NamedEncoder(spec, encoder)


class _NamedEncoder:
    """An encoder of the user's own: what it raises is an InputError that names it."""

    def __init__(self, spec: str, encoder: Any) -> None:
        self._spec, self._encoder = spec, encoder
        self.hidden_size: int = encoder.hidden_size
        self.version: object = encoder.version
        if hasattr(encoder, "encode_stream"):
            self.encode_stream = self._encode_stream

    def encode(self, input_ids_NT: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        with _named(self._spec):
            vectors: npt.NDArray[np.float32] = self._encoder.encode(input_ids_NT)
        return vectors

    def _encode_stream(self, batches: Iterable[npt.NDArray[np.int32]]) -> Iterator[npt.NDArray[np.float32]]:
        with _named(self._spec):
            yield from self._encoder.encode_stream(batches)


@contextmanager
def _named(spec: str) -> Iterator[None]:
    """Turn what an encoder of the user's own raises into an InputError that names it."""
    try:
        yield
    except ArrowbankError:
        raise
    except Exception as error:
        raise InputError(
            f"--encoder {spec}: raised {reason(error)}. Fix the encoder; with --debug and one worker its traceback is shown."
        ) from error


def _takes_no_arguments(factory: Any) -> bool:
    if not callable(factory):
        return False
    try:
        inspect.signature(factory).bind()
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say
        return True
    return True


def stream(encoder: Encoder, batches: Iterable[npt.NDArray[np.int32]]) -> Iterator[npt.NDArray[np.float32]]:
    """Encode batches in order, with look-ahead where the encoder offers it."""
    ahead = getattr(encoder, "encode_stream", None)
    return ahead(batches) if ahead else map(encoder.encode, batches)
