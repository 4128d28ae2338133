"""What is counted is what happens: greedy speculative decoding, written out slowly, keeps as many drafts as the counting says.

Nothing here is the package's but what is tested: the trunk is transformers' own model, the draft a model of one layer with the tensors
that lie in the healed checkpoint, and plain formulas around it. There is no cache: every round runs over the whole text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from arrowbank import TrunkData, build_trunk, heal_draft, open_bank
from arrowbank.mtp.batches import DraftWindows
from arrowbank.mtp.draft_files import load_draft
from arrowbank.mtp.measure import measure
from tests import drafts
from tests.test_capture import one_thread
from tests.test_heal import WINDOW, Case

CHAIN, TEXTS = 3, 12


class Decoder:
    """A trunk and its draft, both without a cache. `hidden` and `recycle` are before the norms, as the checkpoint's record says."""

    def __init__(self, folder: Path) -> None:
        self.trunk = drafts.load_trunk(folder)
        stored = load_file(folder / "model.safetensors")
        mine = {name.removeprefix("model.mtp."): value for name, value in stored.items() if name.startswith("model.mtp.")}
        self.roles = {role: mine.pop(f"{role}.weight") for role in ("eh_proj", "enorm", "hnorm", "norm")}
        config = tf.LlamaConfig(**{**drafts.SMALL, "num_hidden_layers": 1})
        self.body = tf.LlamaModel(config).eval()
        self.body.norm = torch.nn.Identity()
        self.body.load_state_dict(mine, strict=False)
        self.eps = config.rms_norm_eps

    def norm(self, states: torch.Tensor, role: str) -> torch.Tensor:
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps) * self.roles[role]

    def reads(self, text: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The trunk over `text`: its states before its norm, as a bank holds them, and its own next token at every row."""
        seen: list[torch.Tensor] = []
        hook = self.trunk.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        logits = self.trunk(input_ids=torch.tensor([text]), use_cache=False).logits[0]
        hook.remove()
        return seen[0].bfloat16().float(), logits.argmax(-1).tolist()

    def drafts(self, text: list[int], steps: int) -> list[int]:
        """`text` ends with the token that the trunk has just chosen: what the draft says comes after it, `steps` tokens."""
        states, _ = self.reads(text[:-1])
        rows, said = len(text) - 1, list(text)
        for step in range(1, steps + 1):
            embedded = self.trunk.model.embed_tokens(torch.tensor(said[step : step + rows]))
            both = torch.cat([self.norm(embedded, "enorm"), self.norm(states, "hnorm")], -1)
            states = self.body(inputs_embeds=(both @ self.roles["eh_proj"].T)[None], use_cache=False).last_hidden_state[0]
            said.append(int((self.norm(states[-1], "norm") @ self.trunk.lm_head.weight.T).argmax()))
        return said[len(text) :]

    def kept(self, text: list[int], steps: int) -> int:
        """How many drafts after `text` the trunk keeps: it reads them all in one pass, and takes those that it would have said."""
        proposed = self.drafts(text, steps)
        _, choices = self.reads(text + proposed)
        right = [draft == choice for draft, choice in zip(proposed, choices[len(text) - 1 :], strict=False)]
        return [*right, False].index(False)

    def alone(self, prompt: list[int], tokens: int) -> list[int]:
        """What the trunk says without a draft, `tokens` with the prompt."""
        text = list(prompt)
        while len(text) < tokens:
            text.append(self.reads(text)[1][-1])
        return text

    def together(self, prompt: list[int], tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """The same with the draft; and of every round the row it began at, and how many drafts it kept."""
        text, rounds = list(prompt), []
        while len(text) < tokens:
            row, choice = len(text) - 1, self.reads(text)[1][-1]
            text.append(choice)
            kept = self.kept(text, CHAIN)
            text += self.drafts(text, CHAIN)[:kept]
            rounds.append((row, kept))
        return text[:tokens], rounds


def tally(rounds: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """(hits, rows) by step. A step whose target is past the window is not counted: a bank ends there, decoding does not."""
    hits, rows = [0] * CHAIN, [0] * CHAIN
    for row, kept in rounds:
        for step in range(1, CHAIN + 1):
            if row + step < WINDOW and kept >= step - 1:
                rows[step - 1] += 1
                hits[step - 1] += kept >= step
    return hits, rows


@pytest.fixture(scope="module")
def healed(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A case whose model has a healed draft, and whose bank holds what that model's trunk says by itself."""
    folder = tmp_path_factory.mktemp("decoding")
    case = Case(folder)
    heal_draft(case.config(epochs=3.0, train_projection=True), case.bank, folder / "healed")
    case.model = folder / "healed"
    with torch.no_grad(), one_thread():
        decoder = Decoder(case.model)
        texts = [decoder.alone([2 + 7 * start], WINDOW) for start in range(TEXTS)]
    (folder / "own.jsonl").write_text("".join(json.dumps({"input_ids": text}) + "\n" for text in texts))
    case.bank = folder / "own"
    build_trunk(case.trunk_config(sources=(TrunkData("own", folder / "own.jsonl"),), hold_all=True), case.bank)
    return case


@pytest.fixture(scope="module")
def windows(healed: Case) -> DraftWindows:
    return DraftWindows(open_bank(healed.bank), load_draft(drafts.load_trunk(healed.model), healed.model))


@pytest.fixture(autouse=True)
def _quietly() -> Iterator[None]:
    with torch.no_grad(), one_thread():  # hundreds of passes of a millisecond
        yield


@pytest.mark.slow
def test_decoding_keeps_as_many_drafts_as_are_counted_in_order(healed: Case, windows: DraftWindows) -> None:
    decoder, rounds = Decoder(healed.model), []
    for row in range(TEXTS):
        text = windows.bank.read(row).input_ids.tolist()
        said, mine = decoder.together(text[:1], WINDOW)
        assert said == text  # drafting changes nothing but how fast it goes
        rounds += mine
    draft = load_draft(drafts.load_trunk(healed.model), healed.model)
    found = measure(draft, windows, range(TEXTS), chain=CHAIN, in_order=True)
    assert found.in_order is not None
    hits, rows = tally(rounds)
    assert (list(found.in_order.hits), list(found.in_order.rows)) == (hits, rows)
    assert all(0 < hit < row for hit, row in zip(hits[:2], rows, strict=False))  # some kept, some not: it tells something
    assert rows[0] < TEXTS * (WINDOW - 1)


@pytest.mark.slow
def test_a_round_from_every_row_keeps_as_many_drafts_as_are_counted(healed: Case, windows: DraftWindows) -> None:
    decoder, rounds = Decoder(healed.model), []
    for row in range(TEXTS):
        text = windows.bank.read(row).input_ids.tolist()
        rounds += [(at, decoder.kept(text[: at + 2], CHAIN)) for at in range(WINDOW - 1)]
    draft = load_draft(drafts.load_trunk(healed.model), healed.model)
    found = measure(draft, windows, range(TEXTS), chain=CHAIN)
    assert (list(found.whole.hits), list(found.whole.rows)) == tally(rounds)
