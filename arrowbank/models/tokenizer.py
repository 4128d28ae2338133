"""Fast tokenizers: loading any that transformers knows, and a digest of what decides the ids they give.

Only fast (Rust) tokenizers are taken: they are the ones that `encode_batch_fast` and threads speed up, and their whole state
has one canonical text. That text is the fingerprint's material, less its truncation and padding: those a stage sets for itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from arrowbank.errors import InputError
from arrowbank.models.device import quiet, refusing
from arrowbank.models.model_folder import base_folder, resolve_model
from arrowbank.models.sentence_folder import read_sentence_folder

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

_NO_LIMIT = int(1e30)

# How much of a long text is read: about twice the characters of ordinary text for the tokens that are kept, and a margin.
_TOKEN_CHARS, _MARGIN_CHARS, _MARGIN_TOKENS = 8, 2048, 64
_LONG = 4  # times as much is a long text: reading its beginning twice is then less work than reading it whole
_FURTHER_CHARS = 512
# After a letter: no pre-tokenizer in use has a piece that goes on past it. (An apostrophe may begin "'s", which some keep with the word.)
_BOUNDARIES = (re.compile(r"(?<=[^\W\d_])(?=\s)"), re.compile(r"(?<=[^\W\d_])(?=[^\w\s'’])|(?<=[^\W\d_])(?=[0-9])"))


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerFast:
    """The fast tokenizer of `model`, a folder (its tokenizer.json is enough) or a Hub id.

    It comes without the truncation, padding and length warning that the folder may have set: the caller's options decide.
    Raises InputError if there is none, or only a slow one.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = resolve_model(model, weights=False, code=trust_remote_code)
    sentence = read_sentence_folder(folder, per_token=None)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        folder = base_folder(folder, code=trust_remote_code)  # of an adapter that is saved without its tokenizer
    with refusing(lambda reason: _no_tokenizer(model, folder, reason)), quiet():
        if sentence is not None and sentence.static:  # has no model that a tokenizer class would be named for
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(sentence.transformer / "tokenizer.json"))
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    if not tokenizer.is_fast:
        raise InputError(
            f"tokenizer of {model!r} is {type(tokenizer).__name__}, a slow (pure Python) one; expected a fast one. Convert it "
            "once: transformers.convert_slow_tokenizer.convert_slow_tokenizer(tokenizer).save('tokenizer.json') in that folder"
        )
    if set(tokenizer.backend_tokenizer.get_vocab()) <= set(
        tokenizer.all_special_tokens
    ):  # what transformers makes of no files at all
        raise InputError(_no_tokenizer(model, folder, f"its {type(tokenizer).__name__} has no tokens but special ones"))
    if sentence is not None and sentence.lower_case:
        _lower_case(tokenizer.backend_tokenizer)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.model_max_length = _NO_LIMIT
    return tokenizer


def _lower_case(backend: Tokenizer) -> None:
    """Lower case before all else, as sentence-transformers adds it; not where the tokenizer does it already."""
    from tokenizers import normalizers

    there = backend.normalizer
    if there is None or ('"Lowercase"' not in backend.to_str() and '"lowercase":true' not in backend.to_str().replace(" ", "")):
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([there] if there is not None else [])])


def tokenizing() -> AbstractContextManager[None]:
    """A block in which the Rust tokenizer is given texts: what is damaged in it may show only there, and is an InputError."""
    return refusing(_no_tokens)


def encode_texts(backend: Tokenizer, texts: Sequence[str], *, special_tokens: bool = False) -> list[Encoding]:
    """What the Rust tokenizer makes of texts, without offsets. Raises InputError where it fails.

    Where it truncates on the right, of a long text only a beginning is read that decides the tokens kept: see `_beginning`. They are
    those of the whole text; `overflowing` is then only as much of the rest as was read.
    """
    truncation = backend.truncation
    if truncation is not None and truncation["direction"] == "right" and not truncation["stride"]:
        texts = [_beginning(backend, text, int(truncation["max_length"])) for text in texts]
    with tokenizing():
        return list(backend.encode_batch_fast(texts, add_special_tokens=special_tokens))


def _beginning(backend: Tokenizer, text: str, kept: int) -> str:
    """A beginning of `text` whose first `kept` tokens are those of the text; a text that is not long, or has none, itself.

    It ends at a boundary of words, has some more tokens than are kept, and all its tokens begin the tokens of a longer beginning, too: so
    what follows the cut changes none of them, and those that are kept lie far before it.
    """
    size = _TOKEN_CHARS * kept + _MARGIN_CHARS
    while _LONG * size <= len(text):
        cut = _boundary(text, size)
        if cut is not None:
            further = _boundary(text, cut + 2 * _FURTHER_CHARS) or cut + 2 * _FURTHER_CHARS
            with tokenizing():
                shorter, longer = backend.encode_batch_fast([text[:cut], text[:further]], add_special_tokens=False)
            ids = _all_ids(shorter)
            if len(ids) >= kept + _MARGIN_TOKENS and ids == _all_ids(longer)[: len(ids)]:
                return text[:cut]
        size *= 4
    return text


def _boundary(text: str, size: int) -> int | None:
    """The last place in the last characters of text[:size] where a word ends; the end of a line or a space before others."""
    for pattern in _BOUNDARIES:
        ends = [found.start() for found in pattern.finditer(text, size - _FURTHER_CHARS, size)]
        if ends:
            return ends[-1]
    return None


def _all_ids(encoding: Encoding) -> list[int]:
    return list(chain(encoding.ids, *(rest.ids for rest in encoding.overflowing)))


def tokenizer_fingerprint(tokenizer: Path | PreTrainedTokenizerFast) -> str:
    """sha256 (hex) of all that decides ids: the Rust tokenizer's canonical state, special tokens and the truncation side.

    Takes a folder, or the tokenizer if it is loaded already. Neither path nor time enters it.
    """
    loaded = load_tokenizer(str(tokenizer)) if isinstance(tokenizer, Path) else tokenizer
    state = json.loads(loaded.backend_tokenizer.to_str())
    state.pop("truncation", None)
    state.pop("padding", None)
    content = {
        "state": state,
        "special_tokens": {name: str(token) for name, token in loaded.special_tokens_map.items()},
        "truncation_side": loaded.truncation_side,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _no_tokens(reason: str) -> str:
    return f"the tokenizer fails on a text: {reason.splitlines()[0]}. Its tokenizer.json is damaged or incomplete: give another one."


def _no_tokenizer(model: str, folder: Path, reason: str) -> str:
    reason = reason.splitlines()[0]
    if (folder / "tokenizer.json").is_file():
        return f"tokenizer of {model!r} cannot be loaded: {reason}"
    return (
        f"{model!r} has no tokenizer.json and transformers makes no usable tokenizer from it: {reason}\n"
        "Give a folder or Hub id that holds a tokenizer.json."
    )
