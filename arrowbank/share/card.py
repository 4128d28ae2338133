"""A few rows of a bank as a Markdown table: texts cut short, the first of many ids, and of hidden states only how many there are."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from arrowbank.bank import Bank
from arrowbank.bank.cards import Code, as_code, as_text, describe_bank, fact_list, front, front_matter
from arrowbank.bank.checks import Check
from arrowbank.bank.files import human_bytes
from arrowbank.bank.kinds import FOLDER, Description
from arrowbank.bank.manifest import CARD, dataset_info
from arrowbank.bank.remote.addresses import HUB
from arrowbank.bank.remote.fetch import PLOT
from arrowbank.share.destinations import Outgoing
from arrowbank.share.pictures import picture_of, svg

ROWS = 3
TEXT = 80
VALUES = 6
DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64", "uint16": "bfloat16 (as uint16)"}


def sample_table(bank: Bank) -> str:
    """The first rows of `bank`, all columns."""
    table = bank.slice(0, min(ROWS, len(bank)))
    lines = ["| " + " | ".join(map(as_text, table.column_names)) + " |", "|" + " --- |" * table.num_columns]
    lines += [
        "| " + " | ".join(_cell(table.column(name)[row]) for name in table.column_names) + " |" for row in range(table.num_rows)
    ]
    return "\n".join(lines) + "\n"


def _cell(value: pa.Scalar) -> str:
    if not value.is_valid:
        return ""
    kind = value.type
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return _list(value.values)
    if pa.types.is_binary(kind):
        return f"`{value.as_py()[:4].hex()}…`"
    if pa.types.is_floating(kind):
        return f"{value.as_py():.4g}"
    return _text(str(value.as_py()))


def _list(values: pa.Array) -> str:
    """Numbers: the first ones and how many; lists of lists: their shape."""
    if pa.types.is_fixed_size_list(values.type):
        inner = str(values.type.value_type)
        return f"{len(values):,} × {values.type.list_size:,} {DTYPES.get(inner, inner)}"
    shown = [_number(number) for number in values.slice(0, VALUES).to_pylist()]
    more = f", … {len(values):,} in all" if len(values) > VALUES else ""
    return f"[{', '.join(shown)}{more}]"


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else _text(str(value))


def _text(text: str) -> str:
    """A text cut short."""
    line = " ".join(text.split())
    return as_text(f"{line[: TEXT - 1]}…" if len(line) > TEXT else line)


MODELS = ("model_path", "target_model_name_or_path")
DIGESTS = re.compile(r"(.+)_(sha256|fingerprint)")


def pushed_card(bank: Bank, address: str, checks: Sequence[Check], *, license: str | None = None) -> list[Outgoing]:
    """README.md, and plot.svg before it where there is something to draw."""
    picture = picture_of(bank)
    plot = [] if picture is None else [Outgoing.of_bytes(PLOT, svg(picture))]
    return [*plot, Outgoing.of_bytes(CARD, card_text(bank, address, checks, license=license, plot=bool(plot)).encode())]


def unfinished_card(address: str) -> bytes:
    """The card while a push is on."""
    fields = {"tags": ["arrowbank"], "configs": [{"config_name": "default", "data_files": "this-push-has-not-ended/*.arrow"}]}
    text = "# A bank is being pushed\n\nNot all of it is here yet. If nobody is at it, run the same `arrowbank push` again: it goes on.\n"
    return (front_matter(fields) + f"\n{text}\nIts place: {as_code(address)}\n").encode()


def card_text(bank: Bank, address: str, checks: Sequence[Check], *, license: str | None = None, plot: bool = False) -> str:
    """The card of `bank` at `address`."""
    about = describe_bank(bank.manifest)
    facts = {**about.facts, **{name: fact for name, fact in _more_facts(bank.manifest.json).items() if name not in about.facts}}
    made = {
        "rows": len(bank),
        "size": human_bytes(sum(entry.bytes for entry in bank.manifest.files)),
        "shards": len(bank.shard_names),
        **{name: _without_folder(fact) for name, fact in facts.items() if fact != []},
        **_digests(bank),
    }
    parts = [
        front_matter(_fields(bank, about, license)),
        f"# {as_text(_name(address))}\n",
        f"**{as_text(about.title)}**, made by `arrowbank`: Arrow shards that `datasets` maps without a copy, and a manifest that "
        "vouches for every byte of them.\n",
        f"## Load it\n\n{_loading(about, address)}",
        f"## A sample\n\n{sample_table(bank)}",
        *([f"![{as_text(about.title)}]({PLOT})\n"] if plot else []),
        f"## How it was made\n\n{fact_list(made)}\n`manifest.json` says in full what made it.\n",
        f"## Its proof\n\n`arrowbank verify`, right before it was pushed:\n\n{_proof(checks)}",
    ]
    return "\n".join(parts)


def _fields(bank: Bank, about: Description, license: str | None) -> dict[str, Any]:
    """The front matter: what the hub shows, and what `load_dataset` reads."""
    from datasets import DatasetInfo, Features
    from datasets.info import DatasetInfosDict
    from huggingface_hub import DatasetCardData

    fields = front(bank.manifest, about)
    if license:
        fields = {"license": license, **fields}
    model = next((str(bank.manifest[name]) for name in MODELS if bank.manifest.get(name)), "")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists():
        fields["tags"] = [*fields["tags"], f"base_model:{model}"]
    types = DatasetCardData()
    features = Features.from_dict(dataset_info(bank.schema)["features"])
    DatasetInfosDict({"default": DatasetInfo(features=features)}).to_dataset_card_data(types)
    return {**fields, "dataset_info": types["dataset_info"]}


def _without_folder(fact: object) -> object:
    """A path of the machine that made the bank by its last part alone."""
    return Path(fact).name if isinstance(fact, str) and fact.startswith("/") else fact


def _name(address: str) -> str:
    return address.rstrip("/").rpartition("/")[2].partition("@")[0]


def _loading(about: Description, address: str) -> str:
    """Code that runs as it stands."""
    folder, blocks = _name(address), []
    place = address.removeprefix(f"{HUB}datasets/")
    if address.startswith(HUB):
        blocks.append(
            f'```python\nfrom datasets import load_dataset\n\nrows = load_dataset({json.dumps(place)}, split="train")\n```\n'
        )
    blocks.append(
        "Or with every byte checked against the manifest, and mapped from where it was fetched to:\n\n"
        f"```python\nfrom arrowbank import open_bank\n\nbank = open_bank({json.dumps(address)})\n```\n"
    )
    snippet = about.snippet.replace(f'"{FOLDER}"', json.dumps(folder))
    command = f"arrowbank pull {shlex.quote(place)} {shlex.quote(folder)}"
    blocks.append(f"In a folder of your own:\n\n```bash\n{command}\n```\n\n```python\n{snippet}\n```\n")
    return "\n".join(blocks)


def _more_facts(manifest: Mapping[str, Any]) -> dict[str, object]:
    """How a bank was computed, where its manifest says it beside the facts of its kind."""
    encoding = manifest.get("encoding") or {}
    found = {
        "tokenizer": manifest.get("tokenizer"),
        "layer": encoding.get("layer"),
        "computed in": encoding.get("dtype"),
        "quantised": encoding.get("quantisation"),
    }
    return {name: fact for name, fact in found.items() if fact is not None}


def _digests(bank: Bank) -> dict[str, str]:
    """What tells this bank from others: hashes of its plan, of its shards, and of what it was made from."""
    found = {"plan digest": bank.plan_digest, "digest of the shards": bank.content_digest}
    for name, value in {**(bank.manifest.get("encoding") or {}), **bank.manifest.json}.items():
        match = DIGESTS.fullmatch(name)
        if match and isinstance(value, str):
            found[f"{match[2]} of {match[1].replace('_', ' ')}"] = value
    return {name: Code(value) for name, value in found.items()}


def _proof(checks: Sequence[Check]) -> str:
    lines = [f"| {as_text(check.name)} | {'ok' if check.ok else 'FAILED'} | {as_text(check.detail)} |" for check in checks]
    return "\n".join(["| check | | |", "| --- | --- | --- |", *lines]) + "\n"
