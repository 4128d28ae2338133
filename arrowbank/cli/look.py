"""The verbs that look at banks: verify, info, report, estimate, compare, lookup."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arrowbank.cli.options import Common, Later, Texts
from arrowbank.cli.show import CHECK_FAILED, fail_on, progress_for, show_checks, show_estimate
from arrowbank.settings import Help, Range, refuse_unread

if TYPE_CHECKING:
    from arrowbank import EncodeConfig, ReportConfig

BankFolder = Annotated[str, typer.Argument(metavar="BANK", help="A bank's folder, or its address: hf://…, s3://…")]


def verify(
    place: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A bank or its address, an export or cache, or a vocabulary map.")
    ],
    common: Common,
    quick: Annotated[bool, Help("Only sizes and row counts.")] = False,
) -> None:
    """Verify a bank, or what `export` wrote: every byte against its digest, then what the bytes mean. Exit code 1 if a check fails.

    Of a cache without arrowbank-export.json only the structure is verified; the first line says so.

    Example: arrowbank verify router/features
    """
    from arrowbank.report.verify_folder import verify as run

    show_checks(run(place, quick=quick, progress=progress_for(common.json)), common.json)


def info(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A bank, or any folder or file near one.")], common: Common
) -> None:
    """Say what a folder holds, how far it is, and what to run next: banks, models, dumps, exports, files of episodes.

    Example: arrowbank info router/features
    """
    from arrowbank.report.folders import describe_any

    facts = describe_any(folder)
    if common.json:
        _print_json(facts)
        return
    for name, value in facts.items():
        if isinstance(value, dict) and "kind" in value:  # one of the banks that `build` made
            print(f"{name}:")
            _print_facts(value, indent="  ")
        else:
            _print_facts({name: value})


def _print_facts(facts: dict[str, Any], indent: str = "") -> None:
    for name, value in facts.items():
        first, *more = _plain(value).split("\n")
        print(f"{indent}{name.replace('_', ' '):18} {first}", *(f"{indent}{'':18} {line}" for line in more), sep="\n")


def report(
    banks: Annotated[
        list[str], typer.Argument(metavar="BANK...", help="A bank, a folder of `build` or OUT.heal; or several IN2 arms.")
    ],
    out: Annotated[str, Help("The page to write, such as report.html.", "FILE")],
    common: Common,
    config: ReportConfig,
) -> None:
    """Write one HTML page that shows a bank of any kind: it opens without a server or a network. Exit code 1 if a check failed.

    Example: arrowbank report router --out report.html
    """
    from arrowbank.report import write_report

    checks = write_report(config, banks, out, progress=progress_for(common.json))
    failed = [check for check in checks if not check.ok]
    if common.json:
        _print_json({"phase": "done", "ok": not failed, "page": out, "checks": [asdict(check) for check in checks]})
    else:
        print(f"{out}: {Path(out).stat().st_size:,} bytes, open it in a browser")
    fail_on([f"{check.name}  {check.detail}" for check in failed])


def estimate(
    tokens: Annotated[str, typer.Argument(metavar="TOKENS", help="A bank that `tokenize` made, or an engine's dump.")],
    config: Later[EncodeConfig],
    common: Common,
    out: Annotated[str, Help("Where the bank would be stored (for the disk's room).", "DIR")] = ".",
    texts: Texts | None = None,
    no_time: Annotated[bool, Help("Do not load the model to time a few batches.")] = False,
) -> None:
    """Bytes, forward passes and time of an encode (or bytes of a dump's import), before it runs. Exit code 1 if it does not fit.

    Example: arrowbank estimate router/tokens --model Qwen/Qwen3-4B --load-in-4bit
    """
    from arrowbank.features.encode import estimate_encode as run
    from arrowbank.targets.importer import ImportConfig, estimate_import, is_dump

    if is_dump(tokens):
        config.refuse("an engine's dump")
        refuse_unread("an engine's dump", texts=texts, no_time=no_time)
        show_estimate(estimate_import(ImportConfig(target_model="any"), tokens, out), common.json)
        return
    found = run(config(), tokens, out, texts=texts, timed=not no_time, progress=progress_for(common.json))
    show_estimate(found, common.json)


def compare(
    a: Annotated[str, typer.Argument(metavar="A")],
    b: Annotated[str, typer.Argument(metavar="B")],
    common: Common,
    min_cosine: Annotated[float, Range(least=-1), Help("Exit code 1 if any text's cosine is lower.")] | None = None,
) -> None:
    """Compare the vectors of the texts that two feature banks share.

    Example: arrowbank compare router_bf16/features router_nf4/features --min-cosine 0.98
    """
    from arrowbank.features.compare import compare as run

    found = run(a, b)
    if common.json:
        _print_json(asdict(found))
    else:
        print(f"shared texts         {found.shared:,} of {found.rows[0]:,} and {found.rows[1]:,}")
        print(f"cosine               min {found.min_cosine:.6f}, 1st percentile {found.first_percentile_cosine:.6f}, ", end="")
        print(f"mean {found.mean_cosine:.6f}")
        print(f"largest difference   {found.largest_difference:.6f}")
    if min_cosine is not None and not found.min_cosine >= min_cosine:  # NaN is no agreement either
        fail_on([f"the lowest cosine is {found.min_cosine:.6f}, the bound was {min_cosine}"])


def lookup(
    bank: BankFolder,
    text: Annotated[list[str], typer.Argument(metavar="TEXT...")],
    common: Common,
) -> None:
    """Print the row and the vector of a text. Exit code 1 if one is not in the bank.

    Example: arrowbank lookup router/features "Where does Ada live?"
    """
    from arrowbank.bank.kinds.features_bank import FeatureBank
    from arrowbank.bank.open import open_bank

    opened = open_bank(bank, kind=FeatureBank)
    rows = [int(row) for row in opened.rows(text)]
    for one, row in zip(text, rows, strict=True):
        vector = opened.take([row])[0].tolist() if row >= 0 else None
        if common.json:
            _print_json({"text": one, "row": row, "vector": vector})
        elif vector is None:
            print(f"absent  {one!r}")
        else:
            print(f"row {row}  {one!r}  [{', '.join(f'{value:.4f}' for value in vector[:6])}, … {len(vector)} values]")
    if min(rows) < 0:
        raise typer.Exit(CHECK_FAILED)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_plain(name)} {_plain(part)}" for name, part in value.items())
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    # what a folder says of itself may steer a terminal
    return "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in text)
