"""A kind of bank is one module: every command does with its banks what that module says. This one adds a kind of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arrowbank import Bank, ReportConfig, SelectConfig, export, merge, open_bank, select, verify, write_report
from arrowbank.bank import BankWriter, kinds
from arrowbank.bank.checks import Check, found_wrong
from arrowbank.bank.columns import values_of
from arrowbank.bank.kinds import Description, Field, Kind, Types, equal, every_kind, register
from arrowbank.bank.kinds.texts_bank import TextsBank
from arrowbank.bank.manifest import INFO, BankManifest, Count, Manifest
from arrowbank.bank.mirror import finished_batches
from arrowbank.combine.overlap import Overlap
from arrowbank.combine.rules import CombineRules
from arrowbank.errors import CorruptBank, InputError
from arrowbank.formats.registry import ExportConfig
from arrowbank.report.folders import describe_any
from arrowbank.report.section import Section, Story, paragraph
from arrowbank.report.subject import Subject
from arrowbank.share.card import card_text
from arrowbank.share.pictures import Distribution, picture_of
from tests import banks
from tests.mutations import reseal

ADDRESS = "hf://datasets/org/tides"


class TidesManifest(BankManifest, kw_only=True):
    station: str
    high: Count


class TidesBank(Bank):
    manifest: TidesManifest


class Tides(Kind):
    name = "tides"
    manifest = TidesManifest
    words = "table of tides"
    unit = "readings"
    made_by = "`tides measure`"
    next = "tides forecast {folder}"
    shown = ("station",)
    rules = "tests.test_kinds:TideRules"
    picture = "tests.test_kinds:heights"
    story = "tests.test_kinds:tell_tides"
    bank = TidesBank

    def columns(self, manifest: TidesManifest) -> dict[str, Types]:
        return {"height": [pa.int32()]}

    def decided(self, manifest: Manifest, recipe: Mapping[str, Any]) -> Iterator[Field]:
        if "station" in recipe:
            yield from equal(manifest, {"station": recipe["station"]})

    def files_beside(self, bank: Bank) -> dict[str, int | None]:
        return {INFO: None}

    def recounted(self, bank: Bank) -> dict[str, Any]:
        return {"high": sum(int((values_of(part) > 100).sum()) for part in bank.parts("height"))}

    def checks(self, bank: Bank) -> Mapping[str, Callable[[], Check]]:
        return {"heights": partial(check_heights, bank)}

    def describe(self, manifest: TidesManifest) -> Description:
        return Description("Tides", {"station": manifest.station, "high tides": manifest.high}, ("oceans",))


def check_heights(bank: Bank) -> Check:
    wrong = [f"row {row}" for row, height in enumerate(bank.dataset["height"]) if height < 0]
    return found_wrong("heights", wrong, "none below the ground", "below the ground:")


class TideRules(CombineRules):
    """Every reading is kept."""

    def find(self, banks: Sequence[Bank], report: Callable[[int], None]) -> Overlap:
        overlap = Overlap()
        for bank in banks:
            new = [overlap.add(bank, shard, partial(np.arange, rows)) for shard, rows in enumerate(bank.shard_rows)]
            overlap.new.append(sum(new))
        return overlap

    def counted(self, bank: BankWriter, before: dict[str, Any]) -> dict[str, Any]:
        return {"high": sum(int((values_of(batch.column("height")) > 100).sum()) for batch in finished_batches(bank))}


def heights(bank: Bank) -> Distribution:
    return Distribution(np.concatenate([values_of(part) for part in bank.parts("height")]), "cm", "Heights")


def tell_tides(subject: Subject) -> Story:
    bank = subject.bank_as(TidesBank)
    return Story([(str(bank.manifest.high), "high tides")], [Section("Ebb and flow", [paragraph(bank.manifest.station)])])


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    register(Tides)
    yield
    del kinds._KINDS["tides"]


def save_tides(folder: Path, *readings: int, **fields: Any) -> Path:
    manifest = {"station": "Brest", "high": sum(reading > 100 for reading in readings), **fields}
    with BankWriter(folder, kind="tides", recipe={"station": "Brest", "n": list(readings)}, manifest=manifest) as bank:
        bank.write_shard(0, pa.record_batch({"height": pa.array(readings, pa.int32())}))
        bank.commit(rows=len(readings))
    return folder


def test_it_opens_as_its_class(tmp_path: Path) -> None:
    bank = open_bank(save_tides(tmp_path / "tides", 90, 120), {"station": "Brest"})
    assert type(bank) is TidesBank
    assert (bank.manifest.station, bank.manifest.high, len(bank)) == ("Brest", 1, 2)
    assert open_bank(tmp_path / "tides", kind=TidesBank).manifest == bank.manifest
    with pytest.raises(InputError, match=r"a bank of tides, expected texts\. Give a folder that `arrowbank scan` has written"):
        open_bank(tmp_path / "tides", kind=TextsBank)
    banks.make_texts(tmp_path / "texts", 3)
    with pytest.raises(InputError, match=r"a bank of texts, expected tides\. Give a folder that `tides measure` has written"):
        open_bank(tmp_path / "texts", kind=TidesBank)


@pytest.mark.parametrize("kind", ["features", 3, None, int, type("Own", (Bank,), {})], ids=str)
def test_another_class_than_that_of_a_kind_is_refused(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(InputError, match=r"expected (a type|int|Own)"):
        open_bank(save_tides(tmp_path / "tides", 90), kind=kind)


def test_verify_runs_its_checks_and_counts_its_fields(tmp_path: Path) -> None:
    checks = {check.name: check for check in verify(save_tides(tmp_path / "tides", 90, 120))}
    assert all(check.ok for check in checks.values())
    assert checks["heights"].detail == "none below the ground"
    reseal(tmp_path / "tides", lambda manifest: manifest.update(high=2))
    failed = [check.detail for check in verify(tmp_path / "tides") if not check.ok]
    assert failed == ["not what was committed: high is 2, counted 1"]
    checks = {check.name: check for check in verify(save_tides(tmp_path / "low", -5, 120))}
    assert (checks["heights"].ok, checks["heights"].detail) == (False, "below the ground: row 0")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"high": -1}, "high is -1 (Expected `int` >= 0), which no bank of tides has"),
        ({"high": True}, "high is True (Expected `int`, got `bool`), which no bank of tides has"),
        ({"station": None}, "station is None (Expected `str`, got `null`), which no bank of tides has"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    folder = save_tides(tmp_path / "tides", 90)
    reseal(folder, lambda manifest: manifest.update(fields))
    with pytest.raises(CorruptBank) as caught:
        open_bank(folder)
    assert said in str(caught.value)


def test_a_field_that_is_lacking_and_a_column_of_another_type_are_named(tmp_path: Path) -> None:
    reseal(save_tides(tmp_path / "tides", 90), lambda manifest: manifest.pop("high"))
    with pytest.raises(CorruptBank, match="high is nothing, which no bank of tides has"):
        open_bank(tmp_path / "tides")
    with BankWriter(tmp_path / "wide", kind="tides", recipe={}, manifest={"station": "x", "high": 0}) as bank:
        bank.write_shard(0, pa.record_batch({"height": pa.array([1], pa.int64())}))
        bank.commit(rows=1)
    with pytest.raises(CorruptBank, match="column height is int64, expected int32"):
        open_bank(tmp_path / "wide")


def test_what_the_recipe_decides_is_held_against_it(tmp_path: Path) -> None:
    reseal(save_tides(tmp_path / "tides", 90), lambda manifest: manifest.update(station="Saint-Malo"))
    with pytest.raises(CorruptBank, match='station is "Saint-Malo", expected "Brest"'):
        open_bank(tmp_path / "tides")


def test_info_card_and_picture_say_what_it_is(tmp_path: Path) -> None:
    bank = open_bank(save_tides(tmp_path / "tides", 90, 120))
    facts = describe_any(tmp_path / "tides")
    assert (facts["kind"], facts["station"], facts["next"]) == ("tides", "Brest", f"tides forecast {tmp_path / 'tides'}")
    for card in ((tmp_path / "tides" / "README.md").read_text(), card_text(bank, ADDRESS, [])):
        assert "- high tides: 1\n" in card
        assert "- oceans\n" in card
    picture = picture_of(bank)
    assert isinstance(picture, Distribution)
    assert picture.values.tolist() == [90, 120]


def test_the_page_has_its_section(tmp_path: Path) -> None:
    write_report(ReportConfig(), [save_tides(tmp_path / "tides", 90, 120)], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Ebb and flow" in page
    assert "table of tides" in page
    save_tides(tmp_path / "more", 1)
    with pytest.raises(InputError, match="a bank of tides; several banks on one page must be IN2 arms"):
        write_report(ReportConfig(), [tmp_path / "tides", tmp_path / "more"], tmp_path / "page.html")


def test_merge_and_select_follow_its_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = save_tides(tmp_path / "a", 90, 120), save_tides(tmp_path / "b", 120)
    merge([a, b], tmp_path / "both")
    assert open_bank(tmp_path / "both").dataset["height"][:] == [90, 120, 120]
    assert all(check.ok for check in verify(tmp_path / "both"))
    select(SelectConfig(where=("height>100",)), tmp_path / "both", tmp_path / "high")
    assert open_bank(tmp_path / "high", kind=TidesBank).manifest.high == 2
    assert all(check.ok for check in verify(tmp_path / "high"))
    export(ExportConfig(format="parquet"), a, tmp_path / "parquet")
    monkeypatch.setattr(Tides, "rules", "")
    monkeypatch.setattr(Tides, "merge_instead", "Measure again.")
    with pytest.raises(
        InputError, match=r"a bank of tides; only features, targets, texts and token-features can be merged\. Measure again\."
    ):
        merge([a, b], tmp_path / "out")
    with pytest.raises(
        InputError, match="a bank of tides; rows of features, targets, texts, token-features, tokens can be selected"
    ):
        select(SelectConfig(limit=1), a, tmp_path / "out")


def test_every_kind_of_the_package_names_things_that_exist() -> None:
    for kind in every_kind().values():
        for named in (kind.rules, kind.picture, kind.story):
            assert not named or callable(kinds.resolve(named)), f"{kind.name}: {named}"
        assert kind.words
        assert kind.made_by
        assert issubclass(kind.opens, Bank)
        assert kind.opens.__annotations__.get("manifest") in (kind.manifest.__name__, kind.manifest)


def test_a_bank_of_a_kind_that_nobody_knows_opens_as_a_plain_one(tmp_path: Path) -> None:
    with BankWriter(tmp_path / "bank", kind="things", recipe={}) as bank:
        bank.write_shard(0, pa.record_batch({"value": [1, 2]}))
        bank.commit(rows=2)
    assert type(open_bank(tmp_path / "bank")) is Bank
    assert all(check.ok for check in verify(tmp_path / "bank"))
    assert describe_any(tmp_path / "bank")["next"] == f"arrowbank verify {tmp_path / 'bank'}"
    assert "# Bank of things\n" in (tmp_path / "bank" / "README.md").read_text()


def test_fields_that_a_consumer_adds_are_kept_beside_the_typed_ones(tmp_path: Path) -> None:
    path = save_tides(tmp_path / "tides", 90) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "trained_by": {"me": 1}}))
    manifest = open_bank(tmp_path / "tides").manifest
    assert manifest["trained_by"] == manifest.get("trained_by") == {"me": 1}
    assert "trained_by" in manifest
    assert manifest.json == json.loads(path.read_text())
