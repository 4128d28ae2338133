"""What a sentence-transformers folder asks for beside its transformer: modules.json and the files that it names.

A folder without modules.json asks for nothing of this. Read here, checked against `SentenceTransformer(folder)` by the tests:

    modules.json                           the modules in order, each a class and a folder (today's layout, and 0_Transformer)
    N_Pooling/config.json                  the modes, concatenated where there are several; include_prompt
    N_Dense, N_LayerNorm, N_Normalize      applied to the pooled vector, in order
    sentence_bert_config.json              max_seq_length, do_lower_case
    config_sentence_transformers.json      prompts, default_prompt_name, similarity_fn_name, truncate_dim
    0_StaticEmbedding                      a table of a vector a token instead of a transformer; model2vec's folder is one, too
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from arrowbank.errors import InputError
from arrowbank.models.model_folder import MODULES, SINGLE, files_digest, module_folders, read_json

SETTINGS = "config_sentence_transformers.json"
# the file's names in folders of all times
TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    *(f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert")),
)
MODES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_LEGACY = {  # in the order in which several are concatenated
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
NO_LIMIT = 1 << 20  # tokens of a text: more than any model takes
_OWN = "sentence_transformers."
_STATIC, _MASK = "StaticEmbedding", "MultiVectorMask"
_OF_TEXT, _OF_TOKENS = "sentence_embedding", "token_embeddings"
_ACTIVATIONS = {"Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU", "Mish", "Softplus"}


@dataclass(frozen=True)
class Head:
    """A module behind the pooling: "Dense", "LayerNorm" or "Normalize"."""

    kind: str
    folder: Path
    config: Mapping[str, Any]

    @property
    def weights(self) -> Path:
        return self.folder / SINGLE

    def width(self, width: int) -> int:
        """The width of what comes out, of a vector of `width` numbers. InputError for a module of vectors of another width."""
        if self.kind == "Dense" and int(self.config["in_features"]) != width:
            raise InputError(
                f"{self.folder / 'config.json'}: in_features is {self.config['in_features']}, what comes in has {width} dimensions. The "
                "folder was put together of different models: save it again."
            )
        return int(self.config["out_features"]) if self.kind == "Dense" else width


@dataclass(frozen=True, kw_only=True)
class SentenceFolder:
    """What is said in the folder. `transformer` holds config.json and the weights; `pooling` is as `ModelInfo.pooling` has it."""

    folder: Path
    transformer: Path
    static: bool = False
    pooling: str = "mean"
    include_prompt: bool = True
    heads: tuple[Head, ...] = ()
    max_seq_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    similarity: str | None = None
    truncate_dim: int | None = None

    @property
    def normalizes(self) -> bool:
        return any(head.kind == "Normalize" for head in self.heads)

    @property
    def named_modules(self) -> list[str]:
        return [head.kind for head in self.heads]

    def width(self, width: int) -> int:
        """The width of the folder's vectors, of pooled ones of `width`."""
        for head in self.heads:
            width = head.width(width)
        return width if self.truncate_dim is None else min(width, self.truncate_dim)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of all that is asked for here, weights of modules included."""
        said = {
            "pooling": self.pooling,
            "include_prompt": self.include_prompt,
            "heads": [[head.kind, dict(head.config)] for head in self.heads],
            "max_seq_length": self.max_seq_length,
            "lower_case": self.lower_case,
            "prompts": dict(self.prompts),
            "default_prompt": self.default_prompt,
            "truncate_dim": self.truncate_dim,
        }
        files = [head.weights for head in self.heads if head.kind != "Normalize"]
        text = json.dumps(said, sort_keys=True, default=str) + files_digest(self.folder, files)
        return hashlib.sha256(text.encode()).hexdigest()


def read_sentence_folder(folder: Path, *, per_token: bool | None = False) -> SentenceFolder | None:
    """What `folder` asks for; None where it is no sentence-transformers folder. InputError for what is not applied here.

    `per_token`: of the vectors of tokens, not of texts (a MultiVectorEncoder has only these); None: of texts alone, before any vector.
    """
    if not (folder / MODULES).is_file():
        return _model2vec(folder)
    steps = _steps(folder)
    kinds = [kind for kind, _ in steps]
    if not kinds or kinds[0] not in ("Transformer", _STATIC):
        raise _not_applied(folder, kinds[:1] or ["no module"])
    transformer, settings = steps[0][1], _read(folder / SETTINGS)
    heads: dict[str, list[Head]] = {_OF_TEXT: [], _OF_TOKENS: []}
    pooling: dict[str, Any] = {}
    for number, (kind, place) in enumerate(steps[1:], start=1):
        config = _read(place / "config.json")
        if kind == "Pooling" and number == 1 and kinds[0] == "Transformer":
            pooling = config
        elif kind in ("Dense", "LayerNorm", "Normalize") and (
            (name := config.get("module_input_name", _OF_TEXT)) in heads and config.get("module_output_name") in (None, name)
        ):
            heads[name].append(_head(kind, place, config))
        elif kind == _MASK:
            if per_token is False:
                raise _not_applied(folder, [kind], "It gives a vector per token: give --pooling none")
            if per_token and (config.get("skiplist_words") or config.get("keep_only_token_ids")):
                raise InputError(
                    f"{place / 'config.json'}: leaves out the vectors of some tokens (skiplist_words, keep_only_token_ids), which "
                    "arrowbank does not. Empty the lists in a copy of the folder, and leave the tokens out when you score: the tokens bank "
                    "has their ids."
                )
        elif kind != "Dropout":
            raise _not_applied(folder, [kind])
    if per_token is False and heads[_OF_TOKENS]:
        raise _not_applied(folder, [f"{head.kind} of token_embeddings" for head in heads[_OF_TOKENS]], "Give --pooling none")
    own = next((found for name in TRANSFORMER_CONFIGS if (found := _read(transformer / name))), {})
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values() if text is not None):
        raise InputError(
            f"{folder / SETTINGS}: prompts is no object of texts. Repair the file, or name a --pooling to ignore it."
        )
    prompts = {str(name): text for name, text in prompts.items() if text is not None}
    if default is not None and default not in prompts:
        raise InputError(
            f"{folder / SETTINGS}: default_prompt_name is {default!r}, which is none of its prompts. Repair the file."
        )
    return SentenceFolder(
        folder=folder,
        transformer=transformer,
        static=kinds[0] == _STATIC,
        pooling="none" if per_token else _pooling(transformer, pooling) if pooling or "Pooling" in kinds else "mean",
        include_prompt=bool(pooling.get("include_prompt", True)),
        heads=tuple(heads[_OF_TOKENS if per_token else _OF_TEXT]),
        max_seq_length=_count(own, "max_seq_length", transformer) or _tokenizer_limit(transformer),
        lower_case=bool(own.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=prompts[default] if default else "",
        similarity=settings.get("similarity_fn_name"),
        truncate_dim=None if per_token else _count(settings, "truncate_dim", folder),
    )


def _model2vec(folder: Path) -> SentenceFolder | None:
    """A folder that model2vec has saved, without modules.json: its config.json says so."""
    if not (folder / "config.json").is_file() or _read(folder / "config.json").get("model_type") != "model2vec":
        return None
    return SentenceFolder(folder=folder, transformer=folder, static=True)


def _steps(folder: Path) -> list[tuple[str, Path]]:
    """The modules: the name of the class, and its folder. InputError for code of the folder's own."""
    steps = module_folders(folder)
    if foreign := [kind for kind, _ in steps if not kind.startswith(_OWN)]:
        raise InputError(
            f"{folder / MODULES} lists {', '.join(foreign)}, code of the folder's own, which arrowbank does not run: its vectors would not "
            "be this model's. Give an --encoder that calls the model, or name a --pooling to have the pooled hidden states without it."
        )
    return [(kind.rpartition(".")[2], place) for kind, place in steps]


def _not_applied(folder: Path, kinds: list[str], remedy: str = "") -> InputError:
    return InputError(
        f"{folder / MODULES} lists {', '.join(kinds)}, which arrowbank does not apply, so its vectors would not be "
        f"this model's; {remedy or 'name a --pooling to have the pooled hidden states without it'}"
    )


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _count(config: Mapping[str, Any], name: str, where: Path) -> int | None:
    value = config.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InputError(f"{where}: {name} is {value!r}; expected a whole number of at least 1. Repair the file.")
    return value


def _tokenizer_limit(folder: Path) -> int | None:
    """What the tokenizer cuts texts to; a number past all sense stands for none."""
    value = _read(folder / "tokenizer_config.json").get("model_max_length")
    return value if isinstance(value, int) and 0 < value < NO_LIMIT else None


def _pooling(where: Path, config: Mapping[str, Any]) -> str:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _LEGACY.items() if config.get(key)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else [str(mode) for mode in modes]
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise InputError(f"{where}: pooling {unknown[0]!r}; expected one of {', '.join(MODES)}; name a --pooling instead")
    return "+".join(MODES[mode] for mode in modes)


def _head(kind: str, place: Path, config: dict[str, Any]) -> Head:
    if kind == "Dense":
        name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        if not name.startswith("torch.nn.") or name.rpartition(".")[2] not in _ACTIVATIONS:
            raise InputError(
                f"{place}: activation {name!r} of Dense; expected one of torch's {', '.join(sorted(_ACTIVATIONS))}."
            )
        if any(_count(config, size, place) is None for size in ("in_features", "out_features")):
            raise InputError(f"{place / 'config.json'}: a Dense without in_features or out_features. Repair the file.")
    head = Head(kind, place, {name: value for name, value in config.items() if not name.startswith("__")})
    if kind != "Normalize" and not head.weights.is_file():
        raise InputError(
            f"{place} has no {SINGLE}: pickled weights are not read, since they can run code. Save the model again with "
            "sentence-transformers, which writes safetensors."
        )
    return head


@dataclass(frozen=True)
class StaticTable:
    """The vectors of tokens in `file`: the rows that ids have, their width, and the names of the tensors in it."""

    file: Path
    rows: int
    width: int
    vectors: str  # (V, D)
    mapping: str | None  # (ids,): the row of each id; None: the id itself
    weights: str | None  # (ids,): what an id's vector is multiplied by


def static_table(folder: Path) -> StaticTable:
    """The table in `folder`, by the file's header. InputError where there is none."""
    from safetensors import SafetensorError, safe_open

    file = folder / SINGLE
    try:
        with safe_open(file, framework="numpy") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118  (not a dict)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: no whole safetensors file ({error}). Give the folder of a static embedding.") from None
    vectors = next((name for name in ("embedding.weight", "embeddings") if len(shapes.get(name, ())) == 2), None)
    if vectors is None:
        raise InputError(f"{file}: no table embedding.weight or embeddings (found {', '.join(shapes) or 'nothing'}).")
    plain = vectors == "embeddings"
    mapping, weights = (name if plain and name in shapes else None for name in ("mapping", "weights"))
    rows = shapes[mapping][0] if mapping else shapes[vectors][0]
    return StaticTable(file, int(rows), int(shapes[vectors][1]), vectors, mapping, weights)
