"""The demo: a feature bank of text and a model that are already on this machine.

The text is the docstrings of the installed Python library, made into episodes as a router's training data has them: the query is a
function's summary line, the candidates are the paragraphs of its docstring and of some of its neighbours'. The model is the MiniLM that the
`demo` extra installs.

    python recipes/demo_bank.py [--out demo_bank]
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EPISODES = 2400
NEIGHBOURS = 2
SHORTEST, LONGEST = 20, 500  # characters of a paragraph that is worth reading
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
EVAL_EVERY = 10


@dataclass(frozen=True)
class Described:
    """Something with a docstring: its dotted name, the docstring's first line and its paragraphs."""

    name: str
    is_function: bool
    summary: str
    paragraphs: tuple[str, ...]


def write_episodes(folder: Path, episodes: int = EPISODES) -> dict[str, Path]:
    """Write train.jsonl and eval.jsonl into `folder`; their paths by split. The same files for the same Python."""
    modules = [described for path in library_files() if len(described := list(described_in(path))) > 1]
    places = [(module, at) for module in modules for at, one in enumerate(module) if one.is_function]
    # a sample that does not favour the beginning of the alphabet, and is the same everywhere
    places.sort(key=lambda place: hashlib.sha1(place[0][place[1]].name.encode()).digest())
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{split}.jsonl" for split in ("train", "eval")}
    lines: dict[str, list[str]] = {split: [] for split in paths}
    for number, (module, at) in enumerate(places[:episodes]):
        lines["train" if number % EVAL_EVERY else "eval"].append(json.dumps(episode(module, at), ensure_ascii=False))
    for split, path in paths.items():
        path.write_text("".join(f"{line}\n" for line in lines[split]), encoding="utf-8")
    return paths


def episode(module: list[Described], at: int) -> dict[str, object]:
    """The query of the thing at `at`, with its own paragraphs and those of the things around it as candidates."""
    own = module[at]
    around = [module[(at + step) % len(module)] for step in (*range(1, NEIGHBOURS + 1), -1)]
    candidates = [{"text": text, "name": own.name, "relevant": True} for text in own.paragraphs if text != own.summary]
    candidates += [{"text": text, "name": other.name, "relevant": False} for other in around for text in other.paragraphs[:2]]
    return {"query": own.summary, "candidates": candidates}


def library_files() -> list[Path]:
    """The modules of the installed Python library, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]


def described_in(path: Path) -> Iterator[Described]:
    """What a Python file documents, in its order; nothing where it is not Python that this version reads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    module = path.parent.name if path.stem == "__init__" else path.stem
    for name, node in named(tree, module):
        docstring = ast.get_docstring(node) or ""
        summary = docstring.partition("\n")[0].strip()
        paragraphs = [" ".join(text.split()) for text in docstring.split("\n\n")]
        worthy = tuple(text for text in paragraphs if SHORTEST <= len(text) <= LONGEST)
        if worthy and len(summary) >= SHORTEST:
            yield Described(name, isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), summary, worthy)


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def named(node: Documented, name: str) -> Iterator[tuple[str, Documented]]:
    """A module, its classes and its functions, with their dotted names."""
    yield name, node
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from named(child, f"{name}.{child.name}")
