"""`report`: pages of every kind of bank, looked at in a real browser: whole, without a network, and true."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arrowbank import ReportConfig, build_in2, build_probes, build_trunk, heal_draft, open_bank, report, write_report
from arrowbank import TrunkData as Data
from arrowbank.bank.kinds.features_bank import FeatureBank
from arrowbank.cli import main
from arrowbank.errors import IncompleteBank, InputError
from tests import arms, tiny
from tests.kill import tree_bytes
from tests.pages import PHONE, opened
from tests.target_banks import make_target_bank
from tests.test_heal import Case
from tests.test_in2_probes import config as probes_config
from tests.trunk_banks import make, write_ids

HOSTILE = [
    "</script><script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 2">',
    "<!-- <script> ]]> --> &lt;b&gt; ${window.pwned = 3} {{7*7}}",
    "javascript:window.pwned=4",
    "right to left \u202e and \u2028 other \u2029 ends \u0007",
    "<svg/onload=window.pwned=5> 漢字 🙂",
]


def episodes() -> list[str]:
    texts = [*HOSTILE, *tiny.texts(150)]
    return [
        json.dumps({"query": texts[at], "candidates": [{"text": text} for text in texts[at + 1 : at + 4]]})
        for at in range(0, len(texts), 3)
    ]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A folder that `build` made: 156 texts from two sources, hostile ones among them."""
    folder = tmp_path_factory.mktemp("report")
    lines = episodes()
    (folder / "train.jsonl").write_text("\n".join(lines[:40]) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(lines[38:]) + "\n")
    sources = [word for split in ("train", "eval") for word in ("--source", f"{split}={folder / split}.jsonl")]
    argv = ["build", *sources, "--model", str(tiny_bert), "--out", str(folder / "bank"), "--shard-rows", "50"]
    assert main(argv) == 0
    return folder / "bank"


@pytest.fixture(scope="session")
def kinds(built: Path, tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> dict[str, list[Path]]:
    """What to give to `report` for a page of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    alone = folder / "alone"
    shutil.copytree(built / "features", alone / "features")
    make_target_bank(folder / "targets", dump={"lengths": (30, 1, 9, 3, 70)})
    make_target_bank(folder / "small", dump={"lengths": (30, 9, 3)}, codec="fp8", spans="supervised")
    fillers = [arms.save_filler(folder / "filler.bin")]
    found = [arms.build_small(folder, arm) for arm in "abc"]
    build_probes(probes_config(probe_pos=(1.0, 0.5)), fillers, folder / "probes")
    write_ids(folder / "a.jsonl", 60)
    model = folder / "model"
    shutil.copytree(tiny_qwen3, model)
    build_trunk(make(model, Data("<i>a</i>", folder / "a.jsonl"), layers=(-1, 1), max_shard_bytes=40_000), folder / "trunk")
    (folder / "heal").mkdir()
    case = Case(folder / "heal")
    heal_draft(case.config(epochs=0.25, in_order=True), case.bank, folder / "healed", dump=folder / "drafts")
    return {
        "built": [built],
        "features": [built / "features"],
        "features alone": [alone / "features"],
        "tokens": [built / "tokens"],
        "texts": [built / "texts"],
        "targets": [folder / "targets"],
        "targets in fp8": [folder / "small"],
        "an arm": [found[0]],
        "arms": found,
        "probes": [folder / "probes"],
        "trunk": [folder / "trunk"],
        "taps": [folder / "trunk-taps"],
        "a healing": [folder / "healed.heal"],
        "a healed checkpoint": [folder / "healed"],
        "drafts": [folder / "drafts"],
    }


EXPECTED = {
    "built": [
        "Map of the vectors",
        "Tokens a text",
        "Texts by kind",
        "Unique texts by source",
        "Duplicates by source",
        "Norms of the vectors",
    ],
    "features": ["Map of the vectors", "Unique texts by source", "Duplicates by source", "Cosine to the nearest other text"],
    "features alone": ["Map of the vectors", "Tokens a text", "Characters a text", "Texts by kind"],
    "tokens": ["Tokens a text", "Characters a text", "Duplicates by source"],
    "texts": ["Characters a text", "Texts by kind", "Duplicates by source"],
    "targets": ["Norms by layer", "Sequence lengths", "Share of a sample in the loss"],
    "targets in fp8": ["Norms by layer", "Sequence lengths", "Share of a sample in the loss"],
    "an arm": [],
    "arms": ["Needles", "Probes", "Distance from needle to probe", "Rate of the build, b"],
    "probes": ["Trials by condition", "Probe at 1 of the window", "Probe at 0.5 of the window"],
    "trunk": [
        "Probability within the top k",
        "Entropy of the next token",
        "Probability that is not kept",
        "Rate of the build, trunk",
    ],
    "taps": ["Norms by layer", "Sequence lengths"],
    "a healing": ["All windows", "Data set a", "Data set b", "Loss", "Acceptance by chain step"],
    "a healed checkpoint": ["All windows"],
    "drafts": [
        "Probability of the draft's first choice",
        "Entropy of the draft's next token",
        "Norms of what the draft was fed",
    ],
}


@pytest.fixture(scope="session")
def page_of(kinds: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of a kind of bank, made once."""
    folder = tmp_path_factory.mktemp("pages")

    def page(kind: str) -> Path:
        path = folder / f"{kind.replace(' ', '-')}.html"
        if not path.exists():
            config = ReportConfig(points=100) if "Map of the vectors" in EXPECTED[kind] else ReportConfig()
            write_report(config, kinds[kind], path)
        return path

    return page


OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
REPEATED_IDS = """() => {
    const all = [...document.querySelectorAll('[id]')].map(one => one.id);
    return all.filter((id, at) => all.indexOf(id) !== at);
}"""
DRAWN_OUTSIDE = """[...document.querySelectorAll('figure svg[role=img]')].flatMap(svg => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text, circle, rect, path, line')].filter(one => {
        const box = one.getBoundingClientRect();
        return box.left < frame.left - 4 || box.right > frame.right + 14 || box.top < frame.top - 4 || box.bottom > frame.bottom + 4;
    }).map(one => svg.querySelector('title').textContent + ': ' + one.outerHTML.slice(0, 90));
})"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPECTED)
def test_every_kind_of_bank_has_a_page_that_is_whole_in_itself(kind: str, page_of: Callable[[str], Path], browser: Any) -> None:
    with opened(browser, page_of(kind)) as shown:
        page = shown.page
        figures = page.locator("svg[role=img] > title").all_text_contents()
        assert not set(EXPECTED[kind]) - {re.sub(r" \(the longest.*", "", title) for title in figures}
        assert all(page.locator("svg[role=img] > desc").all_text_contents())
        assert page.evaluate(REPEATED_IDS) == []
        assert page.evaluate(DRAWN_OUTSIDE) == []
        page.evaluate(OPEN_ALL)
        for drawn in page.locator("figure").all():
            drawn.locator("details td").first.wait_for()
        light = shown.background()
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        page.emulate_media(color_scheme="dark")
        assert not shown.scrolls_sideways()
        assert shown.background() != light
        assert (shown.requests, shown.errors) == ([], [])


def neighbours_by_hand(bank: FeatureBank, row: int, count: int) -> tuple[list[int], list[float]]:
    vectors = bank.matrix.astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors[row]
    order = [int(other) for other in np.argsort(-cosines, kind="stable") if other != row][:count]
    return order, [float(cosines[other]) for other in order]


def assert_shown(page: Any, bank: FeatureBank, row: int) -> None:
    """The panel is about `row`: its text, and its nearest rows with their texts and cosines."""
    panel = page.locator("#map-panel")
    assert panel.get_attribute("data-row") == str(row)
    assert panel.locator(".chosen").text_content() == bank.dataset[row]["text"]
    rows, cosines = neighbours_by_hand(bank, row, 8)
    shown = panel.locator(".near").all()
    found = [int(one.get_attribute("data-row")) for one in shown]
    said = [float(one.locator(".cosine").text_content()) for one in shown]
    assert said == pytest.approx(cosines, abs=6e-4)
    for one, mine, wanted, cosine in zip(shown, found, rows, cosines, strict=True):
        by_hand = neighbours_by_hand(bank, row, len(bank) - 1)
        assert mine == wanted or by_hand[1][by_hand[0].index(mine)] == pytest.approx(cosine, abs=1e-3)
        assert one.locator(".what bdi").text_content() == bank.dataset[mine]["text"]


def click_point(page: Any, index: int) -> None:
    """Click the middle of a point, as a hand does."""
    page.locator("#map-svg").scroll_into_view_if_needed()
    box = page.locator("#map-points circle").nth(index).bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def lonely_points(page: Any) -> list[int]:
    """Points with no other within a few pixels of the screen, so that a click can only mean them."""
    places = np.array(
        page.locator("#map-points circle").evaluate_all("all => all.map(c => [c.cx.baseVal.value, c.cy.baseVal.value])")
    )
    away = np.linalg.norm(places[:, None] - places[None], axis=2) + 1e9 * np.eye(len(places))
    return [int(index) for index in np.flatnonzero(away.min(axis=1) > 8)]


@pytest.mark.slow
def test_a_click_shows_a_text_and_its_nearest_of_the_whole_bank(
    built: Path, page_of: Callable[[str], Path], browser: Any
) -> None:
    bank = open_bank(built / "features")
    assert isinstance(bank, FeatureBank)
    sample = np.arange(100) * len(bank) // 100
    with opened(browser, page_of("built")) as desk:
        page = desk.page
        assert page.locator("#map-points circle").count() == 100
        for index in lonely_points(page)[:4]:
            click_point(page, index)
            assert_shown(page, bank, int(sample[index]))
        assert page.locator("#map-rings .chosen").count() == 1
        button = page.locator("#map-panel button.near").first  # a neighbour that is on the map, and so can be gone to
        row = int(button.get_attribute("data-row"))
        assert row in sample
        button.click()
        assert_shown(page, bank, row)
        before = int(sample[lonely_points(page)[3]])
        page.get_by_role("button", name="Back", exact=True).click()
        assert_shown(page, bank, before)
        others = page.locator("#map-panel div.near").evaluate_all("all => all.map(one => Number(one.dataset.row))")
        assert not set(others) & set(sample.tolist())
        assert (desk.requests, desk.errors) == ([], [])


@pytest.mark.slow
def test_the_map_can_be_walked_with_keys_alone(built: Path, page_of: Callable[[str], Path], browser: Any) -> None:
    bank = open_bank(built / "features")
    assert isinstance(bank, FeatureBank)
    with opened(browser, page_of("features")) as desk:
        page, seen = desk.page, []
        page.locator("#map-box").focus()
        for key in ("ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown", "Enter"):
            page.keyboard.press(key)
            seen.append(int(page.locator("#map-panel").get_attribute("data-row")))
            assert_shown(page, bank, seen[-1])
        assert len(set(seen)) > 2
        page.keyboard.press("Backspace")
        assert_shown(page, bank, seen[-2])


def test_points_are_coloured_by_kind_or_by_source_and_found_by_their_text(
    built: Path, page_of: Callable[[str], Path], browser: Any
) -> None:
    texts = open_bank(built / "texts").dataset
    sample = [index * len(texts) // 100 for index in range(100)]
    with opened(browser, page_of("built")) as desk:
        page = desk.page
        for name in ("kind", "source"):
            page.get_by_role("radio", name=f"by {name}").check()
            groups = page.locator("#map-legend li").all_text_contents()
            classes = page.locator("#map-points circle").evaluate_all(
                "all => all.map(one => Number(one.classList[1].slice(1)))"
            )
            assert [groups[index] for index in classes] == [texts[row][name] for row in sample]
        page.locator("#map-search").fill("WINDOW.PWNED")
        wanted = [index for index, row in enumerate(sample) if "window.pwned" in texts[row]["text"].lower()]
        assert wanted
        hits = page.locator("#map-points circle").evaluate_all(
            "all => all.flatMap((one, at) => one.classList.contains('hit') ? [at] : [])"
        )
        assert hits == wanted
        assert page.locator("#map-found").text_content() == f"{len(wanted)} found"


@pytest.mark.slow
def test_hostile_texts_stay_texts(built: Path, kinds: dict[str, list[Path]], tmp_path: Path, browser: Any) -> None:
    bank = open_bank(built / "features")
    hostile = {
        "text": HOSTILE[0],
        "nearest": HOSTILE[1],
        "cosine": 0.97,
        "kind": HOSTILE[2],
        "source": "train",
        "against": "eval",
    }
    rows = [{"kind": HOSTILE[0], "source": HOSTILE[1], "against": "eval", "texts": 100, "exact": 3, "near": 4}]
    audit = tmp_path / "audit.json"
    audit.write_text(json.dumps({"threshold": 0.95, "max_shared": 6, "rows": rows, "examples": [hostile]}))
    write_report(ReportConfig(audit=audit, neighbours=20), [built], tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html") as desk:
        page = desk.page
        page.locator("#map-table > summary").click()
        page.locator("#map-table td").first.wait_for()
        kept = [re.sub(r"\s+", " ", text) for text in page.locator("#map-table td bdi").all_text_contents()]
        assert page.locator("#map-table tbody tr").count() == len(bank)
        for text in HOSTILE:
            assert any(re.sub(r"\s+", " ", text).strip() == one.strip() for one in kept)
        page.locator("#map-box").focus()
        page.keyboard.press("ArrowUp")
        for text in HOSTILE:
            page.locator("#map-search").fill(text[:20])
            page.locator("#map-search").press("Enter")
            assert page.locator("#map-panel").locator("img, script, svg, b").count() == 0
        section = page.locator("section#audit")
        assert section.locator("td", has_text=HOSTILE[0]).count() >= 2
        assert "7.0 %" in section.text_content()
        assert "✗ 7 shared, 6 allowed" in section.text_content()
        assert page.evaluate("window.pwned") is None
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2
        assert (desk.requests, desk.errors) == ([], [])
    write_report(ReportConfig(), kinds["trunk"], tmp_path / "trunk.html")
    with opened(browser, tmp_path / "trunk.html") as desk:
        assert desk.page.locator("td", has_text="<i>a</i>").count() > 0
        assert desk.page.locator("i").count() == 0


def test_the_script_has_no_way_to_make_elements_of_texts() -> None:
    script = (Path(report.__file__).parent / "page.js").read_text("utf-8")
    assert not re.search(r"HTML|document\.write|eval|Function\(", re.sub(r"//.*", "", script))


def test_even_a_text_that_got_through_could_not_run_or_reach_out(
    page_of: Callable[[str], Path], tmp_path: Path, browser: Any
) -> None:
    injected = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'><img src='https://example.org/x.png'>"
    path = tmp_path / "page.html"
    path.write_text(page_of("built").read_text("utf-8").replace("<main", f"{injected}<main"), "utf-8")
    with opened(browser, path) as desk:
        assert desk.page.evaluate("window.pwned") is None
        assert desk.page.evaluate("fetch('https://example.org/').catch(() => 'refused')") == "refused"
        assert desk.requests == []
        assert any("Content Security Policy" in error for error in desk.errors)


@pytest.mark.slow
def test_light_and_dark_follow_the_system_until_the_button_is_pressed(page_of: Callable[[str], Path], browser: Any) -> None:
    with opened(browser, page_of("targets")) as desk:
        button = desk.page.locator("#theme")
        light, name = desk.background(), button.text_content()
        button.click()
        dark = desk.background()
        assert dark != light
        assert button.text_content() != name
        button.click()
        assert desk.background() == light
    with opened(browser, page_of("targets"), dark=True) as desk:
        assert desk.background() == dark
        desk.page.locator("#theme").click()
        assert desk.background() == light


def test_the_same_bank_gives_the_same_page_and_is_left_as_it_was(built: Path, tmp_path: Path) -> None:
    before = tree_bytes(built)
    for name in ("one", "two"):
        write_report(ReportConfig(verify=True), [built], tmp_path / f"{name}.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()
    assert tree_bytes(built) == before


def test_a_damaged_file_is_named_and_the_exit_code_says_so(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(built / "features", tmp_path / "bank")
    shard = tmp_path / "bank" / "data-00001.arrow"
    data = bytearray(shard.read_bytes())
    data[-200] ^= 1
    shard.write_bytes(data)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "bank"), "--out", str(page)]) == 0
    assert "bytes differ" not in page.read_text("utf-8")
    assert "Quick checks" in page.read_text("utf-8")
    capsys.readouterr()
    assert main(["report", str(tmp_path / "bank"), "--out", str(page), "--verify", "--json"]) == 1
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (event["ok"], event["page"]) == (False, str(page))
    rows = re.findall(r"<tr>.*?</tr>", page.read_text("utf-8"))
    assert [re.findall(r"data-\d+\.arrow", row) for row in rows if "✗ bytes differ" in row] == [["data-00001.arrow"]]
    assert sum("✓ sha256" in row for row in rows) >= 4
    assert 'id="map-data"' not in page.read_text("utf-8")


def test_a_healings_files_are_looked_for_and_hashed(kinds: dict[str, list[Path]], tmp_path: Path) -> None:
    (folder,) = kinds["a healing"]
    page = tmp_path / "page.html"
    (check,) = write_report(ReportConfig(verify=True), [folder], page)
    assert (check.ok, check.detail) == (True, "sha256")
    assert json.loads((folder / "report.json").read_text())["plan"] in page.read_text("utf-8")
    moved = tmp_path / "moved"  # both together, under another folder
    shutil.copytree(folder, moved / "healed.heal")
    report = json.loads((folder / "report.json").read_text())
    report["files"][0]["folder"] = "elsewhere/healed"
    (moved / "healed.heal" / "report.json").write_text(json.dumps(report))
    assert not write_report(ReportConfig(), [moved / "healed.heal"], page)[0].ok
    shutil.copytree(folder.with_name("healed"), moved / "healed")
    assert write_report(ReportConfig(verify=True), [moved / "healed"], page)[0].ok
    with (moved / "healed" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    (check,) = write_report(ReportConfig(verify=True), [moved / "healed"], page)
    assert check.detail == "bytes differ in model.safetensors"


def test_what_is_no_page_is_refused(built: Path, kinds: dict[str, list[Path]], tmp_path: Path) -> None:
    shutil.copytree(built / "features", tmp_path / "unfinished")
    (tmp_path / "unfinished" / "state.json").unlink()
    for banks, error, words in (
        ([tmp_path / "unfinished"], IncompleteBank, "not committed"),
        ([tmp_path / "absent"], InputError, "no such folder"),
        ([built / "features", kinds["trunk"][0]], InputError, "several banks on one page must be IN2 arms"),
        ([*kinds["arms"], kinds["arms"][0]], InputError, "given twice"),
        ([], InputError, "no bank is given"),
    ):
        with pytest.raises(error, match=words):
            write_report(ReportConfig(), banks, tmp_path / "page.html")
    for out in (tmp_path, built / "features" / "manifest.json"):
        with pytest.raises(InputError, match=r"expected a file that ends in \.html"):
            write_report(ReportConfig(), [built], out)
    shutil.copytree(kinds["a healing"][0], tmp_path / "half.heal")
    (tmp_path / "half.heal" / "report.json").unlink()
    with pytest.raises(IncompleteBank, match="not done"):
        write_report(ReportConfig(), [tmp_path / "half.heal"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_texts_of_another_bank_that_happen_to_lie_beside_are_not_used(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built / "features", tmp_path / "features")
    tiny.save_texts_bank(tmp_path / "texts", tiny.texts(len(open_bank(built / "texts"))))
    write_report(ReportConfig(points=20), [tmp_path / "features"], tmp_path / "page.html")
    assert "by source" not in (tmp_path / "page.html").read_text("utf-8")
    shutil.rmtree(tmp_path / "texts")
    shutil.copytree(built / "texts", tmp_path / "texts")
    write_report(ReportConfig(points=20), [tmp_path / "features"], tmp_path / "page.html")
    assert "by source" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("texts", [1, 2, 3])
def test_the_smallest_banks_have_pages_too(texts: int, tmp_path: Path, bpe_tokenizer: Path, browser: Any) -> None:
    encode_texts(tiny.texts(texts), tmp_path, bpe_tokenizer)
    write_report(ReportConfig(), [tmp_path / "features"], tmp_path / "page.html")
    with opened(browser, tmp_path / "page.html", size=PHONE) as phone:
        phone.page.locator("#map-box").focus()
        phone.page.keyboard.press("ArrowRight")
        assert phone.page.locator("#map-panel .near").count() == texts - 1
        assert phone.errors == []
        assert not phone.scrolls_sideways()


@pytest.mark.slow
def test_a_page_stays_small_however_many_and_long_the_texts_are(tmp_path: Path, bpe_tokenizer: Path) -> None:
    long = "a word that is said again and again, " * 20
    encode_texts([f"{row} {long}" for row in range(9000)], tmp_path, bpe_tokenizer)
    write_report(ReportConfig(), [tmp_path / "features"], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 4_000_000


def encode_texts(texts: list[str], folder: Path, tokenizer: Path) -> None:
    """A feature bank of `texts` alone, by an encoder that is a table, without a mirror."""
    tiny.save_texts_bank(folder / "t", texts)
    assert (
        main(
            [
                "tokenize",
                str(folder / "t"),
                "--tokenizer",
                str(tokenizer),
                "--max-tokens",
                "16",
                "--out",
                str(folder / "tok"),
                "--workers",
                "1",
            ]
        )
        == 0
    )
    argv = [
        "encode",
        str(folder / "tok"),
        "--encoder",
        "tests.banks:TableEncoder",
        "--out",
        str(folder / "features"),
        "--no-mirror",
    ]
    assert main(argv) == 0


def test_arms_of_other_lengths_share_one_axis(tmp_path: Path) -> None:
    filler = arms.save_filler(tmp_path / "filler.bin")
    folders = [tmp_path / "short", tmp_path / "long"]
    for folder, length in zip(folders, (600, 1200), strict=True):
        build_in2(arms.small("c", length=length), [filler], folder)
    write_report(ReportConfig(), folders, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "✗ differ" in page
    assert "<h1><bdi>short, long</bdi></h1>" in page


@pytest.mark.slow
def test_what_an_audit_found_is_shown_beside(built: Path, tmp_path: Path, browser: Any) -> None:
    sources = [word for split in ("train", "eval") for word in ("--source", f"{split}={built.parent / split}.jsonl")]
    audit, page = tmp_path / "audit.json", tmp_path / "page.html"
    assert main(["audit", str(built / "features"), *sources, "--threshold", "0.9", "--out", str(audit)]) == 0
    assert main(["report", str(built), "--audit", str(audit), "--out", str(page)]) == 0
    found = json.loads(audit.read_text())
    with opened(browser, page) as shown:
        section = shown.page.locator("section#audit")
        for row in found["rows"]:
            cells = [row["kind"], row["source"], row["against"], *(f"{row[name]:,}" for name in ("texts", "exact", "near"))]
            assert any(line[:6] == cells for line in rows_of(section))
        assert len(found["examples"]) == section.locator("tbody tr").count() - len(found["rows"])
        assert shown.errors == []


def rows_of(section: Any) -> list[list[str]]:
    return [row.locator("td").all_text_contents() for row in section.locator("tbody tr").all()]


@pytest.mark.parametrize(
    ("name", "contents"), [("report.json", "[]"), ("report.json", "{}"), ("trace.jsonl", "{"), ("trace.jsonl", "[]")]
)
def test_a_healing_with_somebody_elses_files_is_no_traceback(
    kinds: dict[str, list[Path]], tmp_path: Path, name: str, contents: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(kinds["a healing"][0], tmp_path / "x.heal")
    (tmp_path / "x.heal" / name).write_text(contents)
    assert main(["report", str(tmp_path / "x.heal"), "--out", str(tmp_path / "page.html")]) == 2
    assert "is not what `arrowbank heal` writes" in capsys.readouterr().err


def test_a_healing_that_one_stands_in_finds_its_checkpoints(
    kinds: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kinds["a healing"][0])
    assert main(["report", ".", "--out", str(tmp_path / "page.html")]) == 0
