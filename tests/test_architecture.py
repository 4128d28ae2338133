"""The picture of the wings, and what the package's code never does, as tests.

cli → report, share → combine → features, targets, in2, mtp → formats → models → inputs, engine, drawing → bank → errors, progress
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import arrowbank

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "arrowbank"
MODULES = sorted(PACKAGE.rglob("*.py"))

# each wing may import what stands below it, and never what stands beside it
LAYERS: dict[str, int] = {
    unit: level
    for level, units in enumerate(
        [
            ["secrets"],
            ["errors", "progress"],
            ["settings"],
            ["bank"],
            ["inputs", "engine", "drawing"],
            ["models"],
            ["formats"],
            ["features", "targets", "in2", "mtp"],
            ["combine"],
            ["share", "report"],
            ["cli"],
            ["__main__"],
            [""],  # arrowbank/__init__.py names everything, lazily
        ]
    )
    for unit in units
}
# the two places that catch everything: an exception inside a check becomes that check's FAIL line; the outer net of the command line
BROAD = {"bank/checks.py": "attempt", "cli/__init__.py": "_run"}

HEAVY = ("torch", "transformers", "datasets", "ray", "pyarrow", "numpy", "typer", "rich")


def unit_of(parts: tuple[str, ...]) -> str:
    """The file or folder under arrowbank/ that a module belongs to."""
    return parts[1] if len(parts) > 1 else ""


def module_parts(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, module parts) of everything of arrowbank that a file imports, inside functions and for types too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            names = [
                f"arrowbank.{arrowbank._HOME.get(alias.name, alias.name)}" if node.module == "arrowbank" else str(node.module)
                for alias in node.names
            ]
        else:
            continue
        yield from ((node.lineno, tuple(name.split("."))) for name in names if name.split(".")[0] == "arrowbank")


def test_the_picture_has_every_wing_and_no_other() -> None:
    assert {unit_of(module_parts(path)) for path in MODULES} == set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    own = unit_of(module_parts(path))
    for line, parts in imports_of(path):
        other = unit_of(parts)
        if other in ("__version__", own) or parts == ("arrowbank",):  # the bare name loads nothing
            continue
        down = LAYERS[other] < LAYERS[own] or (own, other) == ("__main__", "")
        assert down, f"{path}:{line}: {own or 'arrowbank'} imports {other}, which does not stand below it"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Nor do they inside functions: whoever reads one module can read what it needs before it."""
    known = {".".join(module_parts(path)): path for path in MODULES}
    needs: dict[str, set[str]] = {}
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        types = {id(node) for block in tree.body if is_for_types(block) for node in ast.walk(block)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in types:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    needs.setdefault(module, set()).add(full if full in known else str(node.module))
    needs.pop("arrowbank")  # it names everything
    read: set[str] = set()
    while ready := {
        module for module in known if module not in read and needs.get(module, set()) & known.keys() <= read | {module}
    }:
        read |= ready
    circle = set(known) - read
    while leaves := {module for module in circle if not any(module in needs[other] for other in circle - {module})}:
        circle -= leaves
    assert not circle


def is_for_types(block: ast.stmt) -> bool:
    return isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"


def test_the_page_about_the_code_names_what_there_is() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    wings = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)/` \|", page, flags=re.MULTILINE)) == wings
    named = {name for name in re.findall(r"`(?:arrowbank/)?([\w/]+\.py)`", page) if not name.startswith("tests/")}
    assert {name for name in named if "NAME" not in name and not (PACKAGE / name).exists()} == set()


def test_a_file_name_exists_once() -> None:
    names = [path.name for path in MODULES if path.name != "__init__.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_plain(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert not text.strip() or ast.get_docstring(tree), f"{path}: a module starts with what it is"
    allowed = {id(node) for node in broad_handlers_of(tree, BROAD.get(path.relative_to(PACKAGE).as_posix(), ""))}
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), f"{path}:{getattr(node, 'lineno', 0)}: assert is not for the package"
        if isinstance(node, ast.ExceptHandler) and id(node) not in allowed:
            assert_narrow(path, node)


def broad_handlers_of(tree: ast.Module, function: str) -> list[ast.ExceptHandler]:
    """The last handler of the function that may be broad."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return [[node for node in ast.walk(one) if isinstance(node, ast.ExceptHandler)][-1] for one in found]


def assert_narrow(path: Path, handler: ast.ExceptHandler) -> None:
    """A handler catches what it names, or passes on what it caught."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in caught)
    passes_on = isinstance(handler.body[-1], ast.Raise)
    assert passes_on or not broad, f"{path}:{handler.lineno}: a broad except that swallows"


def test_importing_arrowbank_loads_nothing_heavy() -> None:
    code = f"import arrowbank, arrowbank.errors, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["", "build", "search", "heal", "targets capture", "trunk build", "in2 score"])
def test_the_help_of_the_command_line_loads_no_torch(verb: str) -> None:
    code = (
        f"import sys; from arrowbank.cli import main; code = main([*{verb!r}.split(), '--help']);"
        "print([m for m in ('torch', 'transformers', 'datasets', 'ray') if m in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[] 0"


@pytest.mark.slow
def test_every_public_name_is_there() -> None:
    code = "import arrowbank; print([name for name in arrowbank.__all__ if getattr(arrowbank, name, None) is None])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_said_once() -> None:
    assert f'version = "{arrowbank.__version__}"' in (ROOT / "pyproject.toml").read_text()
