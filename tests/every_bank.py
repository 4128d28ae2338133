"""One small real bank of every kind and maker, made by the commands' own functions; some need a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from arrowbank import (
    CaptureConfig,
    EncodeConfig,
    ModelConfig,
    ProbesConfig,
    RunOptions,
    ScanConfig,
    SelectConfig,
    TokenizeConfig,
    TrunkData,
    build_probes,
    build_trunk,
    capture,
    encode,
    import_targets,
    merge,
    scan,
    select,
    tokenize,
)
from arrowbank.engine.plan import BatchRules
from tests import arms, target_banks, tiny, trunk_banks
from tests.dumps import make_dump

CONFIG = EncodeConfig(encoder="tests.banks:TableEncoder", shard_rows=12, rules=BatchRules(max_batch=4, token_budget=64))


class Banks:
    """The banks in a folder, each made when it is first asked for, of others where it needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Path:
        out = self.folder / name
        if not (out / "state.json").exists():
            MAKERS[name](self, out)
        return out

    def source(self, name: str, first: int, count: int) -> ScanConfig:
        """Episodes `first` and on, some texts of which are there twice, and one field is never a text."""
        path = self.folder / f"{name}.jsonl"
        episodes = [
            {"query": f"what is {row % 20}?", "candidates": [{"text": f"it is {row} — näher"}, {"text": "same"}], "title": row}
            for row in range(first, first + count)
        ]
        path.write_text("".join(json.dumps(episode, ensure_ascii=False) + "\n" for episode in episodes))
        fields = (("query", "query"), ("candidate", "candidates[].text"), ("title", "title"))
        return ScanConfig(sources=(("train", str(path)), ("eval", str(path))), fields=fields)

    def model(self) -> Path:
        folder = self.folder / "qwen3"
        return folder if folder.exists() else tiny.save_qwen3(folder, chat_template=tiny.TAGGED_TEMPLATE)

    def model_config(self) -> ModelConfig:
        return ModelConfig(model=str(self.model()), device="cpu")

    def dump(self, name: str, seed: int = 0) -> Path:
        folder = self.folder / name
        if not folder.exists():
            target_banks.make_dump(
                folder, lengths=(5, 3, 9, 3), seed=seed, names=[f"{name}-{row}.safetensors" for row in range(4)]
            )
        return folder


def _tokens(banks: Banks, texts: str, out: Path) -> None:
    tokenize(
        TokenizeConfig(tokenizer=str(banks.model()), max_tokens=8, shard_rows=20),
        banks[texts],
        out,
        options=RunOptions(workers=1),
    )


def _probes(banks: Banks, out: Path) -> None:
    config = ProbesConfig(length=300, key_len=2, val_len=3, alphabet=300, vocab=arms.VOCAB, shard_tokens=1500)
    build_probes(config, [arms.save_filler(banks.folder / "filler.bin")], out)


def _quarantined(banks: Banks, out: Path) -> None:
    """Of a dump with a sample of another width and one that holds Inf."""
    folder = banks.folder / "damaged-dump"

    def change(row: int, tensors: dict[str, object]) -> dict[str, object]:
        if row == 1:
            return tensors | {"target_last_hidden_states": tensors["target_last_hidden_states"][:, :-1]}  # type: ignore[index]
        if row == 2:
            tensors["target_hidden_states"][0, 0, 0] = float("inf")  # type: ignore[index]
        return tensors

    make_dump(folder, change=change)  # type: ignore[arg-type]
    import_targets(target_banks.import_config(on_bad_sample="quarantine", on_nonfinite="drop"), folder, out)


def _captured(banks: Banks, out: Path) -> None:
    chats = banks.folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(chat) + "\n" for chat in tiny.conversations(8)))
    config = CaptureConfig(
        model=banks.model_config(),
        data=chats,
        target_layer_ids=(0, 1),
        max_length=120,
        min_loss_tokens=1,
        max_shard_bytes=20_000,
    )
    capture(config, out)


def _trunk(banks: Banks, out: Path) -> None:
    for name, records in (("a", 30), ("b", 20)):
        trunk_banks.write_ids(banks.folder / f"{name}.jsonl", records)
    data = (TrunkData("a", banks.folder / "a.jsonl"), TrunkData("b", banks.folder / "b.jsonl", 300))
    build_trunk(trunk_banks.make(banks.model(), *data, layers=(0, 1), max_shard_bytes=20_000, window=40), out)


def _drafts(banks: Banks, out: Path) -> None:
    from tests.test_heal import Case

    case = Case(banks.folder / "case")
    from arrowbank import heal_draft

    heal_draft(case.config(epochs=0.1), case.bank, banks.folder / "healed", dump=out)


MAKERS: dict[str, Callable[[Banks, Path], object]] = {
    "texts": lambda banks, out: scan(banks.source("first", 0, 25), out),
    "texts-grown": lambda banks, out: scan(replace(banks.source("second", 15, 30), onto=str(banks["texts"])), out),
    "texts-other": lambda banks, out: scan(banks.source("third", 20, 40), out),
    "texts-merged": lambda banks, out: merge([banks["texts"], banks["texts-other"]], out),
    "texts-selected": lambda banks, out: select(SelectConfig(where=("kind=query",)), banks["texts"], out),
    "tokens": lambda banks, out: _tokens(banks, "texts", out),
    "tokens-grown": lambda banks, out: _tokens(banks, "texts-grown", out),
    "tokens-other": lambda banks, out: _tokens(banks, "texts-other", out),
    "tokens-selected": lambda banks, out: select(SelectConfig(limit=9), banks["tokens"], out),
    "features": lambda banks, out: encode(CONFIG, banks["tokens"], out),
    "features-bare": lambda banks, out: encode(replace(CONFIG, mirror=False), banks["tokens"], out),
    "features-model": lambda banks, out: encode(EncodeConfig(model=banks.model_config(), shard_rows=30), banks["tokens"], out),
    "token-features": lambda banks, out: encode(
        EncodeConfig(
            model=replace(banks.model_config(), pooling="none"), rules=BatchRules(max_batch=4, token_budget=64), shard_rows=30
        ),
        banks["tokens"],
        out,
    ),
    "token-features-selected": lambda banks, out: select(SelectConfig(where=("kind=query",)), banks["token-features"], out),
    "features-grown": lambda banks, out: encode(replace(CONFIG, onto=str(banks["features"])), banks["tokens-grown"], out),
    "features-other": lambda banks, out: encode(CONFIG, banks["tokens-other"], out),
    "features-merged": lambda banks, out: merge([banks["features"], banks["features-other"]], out),
    "features-selected": lambda banks, out: select(SelectConfig(where=("kind=query",)), banks["features"], out),
    "targets": lambda banks, out: import_targets(target_banks.import_config(max_shard_bytes=500), banks.dump("dump"), out),
    "targets-other": lambda banks, out: import_targets(target_banks.import_config(), banks.dump("other", 1), out),
    "targets-fp8": lambda banks, out: import_targets(
        target_banks.import_config(codec="fp8", spans="supervised"), banks.dump("dump"), out
    ),
    "targets-quarantined": _quarantined,
    "targets-captured": _captured,
    "targets-merged": lambda banks, out: merge([banks["targets"], banks["targets-other"]], out),
    "targets-selected": lambda banks, out: select(SelectConfig(limit=2), banks["targets"], out),
    "in2-a": lambda banks, out: arms.build_small(out.parent, "a", name=out.name),
    "in2-c": lambda banks, out: arms.build_small(out.parent, "c", name=out.name),
    "in2-bare": lambda banks, out: arms.build_small(out.parent, "b", name=out.name, mirror=False),
    "probes": _probes,
    "trunk": _trunk,
    "trunk-taps": lambda banks, out: banks["trunk"],
    "drafts": _drafts,
}
