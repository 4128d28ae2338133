"""Loss masks for hidden states that came without: joined from the conversations or token rows that the engine was given."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from arrowbank.errors import InputError
from arrowbank.formats.dump import BadSample
from arrowbank.models.tokenizer import load_tokenizer
from arrowbank.progress import SILENT, Progress
from arrowbank.settings import refuse_unread
from arrowbank.targets.conversations import ChatTokenizer
from arrowbank.targets.target_rows import ASSISTANT_TOKENS, Ids, Mask, RowMaker, RowRules, loss_mask_rule, samples_at

NO_LIMIT = np.iinfo(np.int32).max


class JoinedMasks:
    """The loss mask of a sample, by its name and tokens, from the rows at `path`.

    The tokens decide: a row of the same tokens has the mask. An id tells apart rows of the same tokens and other masks, and finds the
    row of tokens that the engine cut short. `tokenizer` makes tokens of conversations.

    Raises InputError for rows that cannot be read.
    """

    def __init__(self, path: str | Path, tokenizer: str | None, *, progress: Progress = SILENT) -> None:
        records = samples_at(path)
        self.rule = loss_mask_rule(records)
        chat = None
        if self.rule == ASSISTANT_TOKENS:
            if tokenizer is None:
                raise InputError(
                    f"--masks {path}: holds conversations. Give --tokenizer MODEL, the target's, to make tokens of them."
                )
            chat = ChatTokenizer(load_tokenizer(tokenizer), tokenizer)
        else:
            refuse_unread(f"--masks {path}, which holds token rows", None, tokenizer=tokenizer)
        rules = RowRules(
            loss_mask=self.rule,
            max_length=NO_LIMIT,
            min_loss_tokens=0,
            limit=None,
            vocab_size=NO_LIMIT,
            max_positions=None,
            model=str(tokenizer or path),
        )
        self._path, self._rows = path, list[tuple[Ids, Mask]]()
        self._names, self._tokens = dict[str, int](), dict[bytes, list[int]]()
        maker = RowMaker(records, rules, chat)
        with progress.phase("masks", None, unit="samples") as phase:
            for number, row in enumerate(maker):
                self._rows.append((row.input_ids, row.loss_mask))
                self._names.setdefault(row.name, number)
                self._tokens.setdefault(_print(row.input_ids), []).append(number)
                phase.advance(1)

    def __call__(self, name: str, ids: Ids) -> Mask:
        """The mask [S] of the sample `name` of tokens `ids` [S]. BadSample where no row has it, or several have different ones."""
        named, same = self._names.get(name), self._tokens.get(_print(ids), [])
        masks = [self._rows[number][1] for number in same]
        if named in same:
            masks = [self._rows[named][1]]
        elif not same and named is not None and np.array_equal(self._rows[named][0][: len(ids)], ids):
            masks = [self._rows[named][1][: len(ids)]]  # the engine cut it
        if not masks:
            found = (
                "no row has its tokens"
                if named is None
                else f"the row of the id {name} has other tokens, and no row has its own"
            )
            raise BadSample(f"{found} in --masks {self._path}; expected the rows that the engine was given")
        if any(not np.array_equal(mask, masks[0]) for mask in masks[1:]):
            raise BadSample(
                f"{len(masks)} rows of --masks {self._path} have its tokens, and not one mask; expected ids that tell them apart"
            )
        return masks[0]


def _print(ids: Ids) -> bytes:
    return hashlib.sha256(ids.tobytes()).digest()
