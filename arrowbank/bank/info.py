"""What a folder is, in a few facts, also when it is unfinished, and what to run next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arrowbank.bank.manifest import JOURNAL, MANIFEST, STATE, Manifest, Receipt, read_json, read_manifest

PARTS = ("texts", "tokens", "features")  # of a folder that `build` made
NEXT = {
    "texts": "arrowbank tokenize {folder} --tokenizer M --out DIR",
    "tokens": "arrowbank encode {folder} --model M --out DIR",
    "features": "arrowbank verify {folder}\narrowbank search {folder} TEXT\narrowbank report {folder} --out report.html",
    "targets": "arrowbank targets verify {folder} --model M\narrowbank export {folder} --to FORMAT --out DIR",
    "in2": "arrowbank in2 verify {folder}\narrowbank export {folder} --to FORMAT --out DIR",
    "in2-probes": "arrowbank in2 score {folder} --model M --out DIR",
    "trunk": "arrowbank heal --trunk {folder} --model M --out DIR",
}
IN2 = ("arm", "T", "examples", "triples", "decoys_placed", "seed", "split")
TARGETS = ("target_model_name_or_path", "target_layer_ids", "last_hidden_norm", "codec", "spans")
TRUNK = ("window", "topk", "hidden_norm", "hidden_dtype", "hold_all")
SHOWN = (
    "kinds",
    "counts",
    "tokenizer",
    "max_tokens",
    "model_path",
    "hidden_size",
    "max_key_tokens",
    "encoding",
    "limit",
    *TARGETS,
    *IN2,
    *TRUNK,
)


def describe_folder(folder: str | Path) -> dict[str, Any]:
    """Facts about the bank in `folder`, or about each bank of a folder that `build` made. InputError where there is none."""
    folder = Path(folder)
    parts = [] if (folder / MANIFEST).exists() else [part for part in PARTS if (folder / part / MANIFEST).exists()]
    if parts:
        return {part: describe_folder(folder / part) for part in parts}
    manifest = read_manifest(folder)
    committed = (folder / STATE).exists() and bool(manifest["complete"])
    rows = manifest["rows"] if committed else _receipt_rows(folder, manifest)
    total = manifest.get("text_count")
    next_step = NEXT.get(manifest["kind"], "arrowbank verify {folder}")
    return {
        "folder": str(folder),
        "kind": manifest["kind"],
        "state": "committed" if committed else "not committed: trainers refuse it",
        "rows": rows,
        **({"rows_in_all": total} if not committed and total is not None else {}),
        "bytes": sum(path.stat().st_size for path in folder.iterdir() if path.is_file()),
        **{name: manifest[name] for name in SHOWN if manifest.get(name) is not None},
        "plan_digest": manifest["plan_digest"],
        "next": next_step.format(folder=folder)
        if committed
        else "the command that began it, again: it goes on where it stopped",
    }


def _receipt_rows(folder: Path, manifest: Manifest) -> int:
    receipts = (Receipt(**read_json(path)) for path in (folder / JOURNAL).glob("data-*.json"))
    return sum(receipt.rows or 0 for receipt in receipts if receipt.plan_digest == manifest["plan_digest"])
