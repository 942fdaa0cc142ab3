"""The layering of the packages. The order is read from docs/architecture.md, which states it once."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "arcuate"
PAGE = ROOT / "docs" / "architecture.md"


def layers() -> list[str]:
    """Packages and base modules from top to bottom: the first column of the table under "Packages"."""
    section = PAGE.read_text("utf-8").split("## Packages")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)`", section, re.MULTILINE)


def imports(path: Path) -> set[str]:
    """Top-level names below `arcuate` that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "arcuate":
            parts = node.module.split(".")[1:]
            found |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("arcuate.")}
    return found


def modules() -> list[tuple[str, Path]]:
    files = [p for p in SRC.rglob("*.py") if p.parent != SRC or not p.stem.startswith("__")]
    return [(p.relative_to(SRC).with_suffix("").parts[0], p) for p in sorted(files)]


def test_the_page_lists_all_packages() -> None:
    assert set(layers()) == {name for name, _ in modules()}


def test_the_top_level_stays_small() -> None:
    """What `ls src/arcuate` shows: at most fourteen packages and eight modules."""
    packages = {name for name, path in modules() if path.parent != SRC}
    assert len(packages) <= 14 and len({name for name, _ in modules()} - packages) <= 8


def test_imports_point_upwards() -> None:
    """A package imports packages above it in the table, so the package graph has no cycle."""
    order = layers()
    wrong = [
        f"{path.relative_to(SRC)} imports {other}"
        for name, path in modules()
        for other in imports(path) & set(order)
        if order.index(other) > order.index(name)
    ]
    assert not wrong, wrong


def test_only_the_doctor_and_the_command_line_import_insight() -> None:
    for name, path in modules():
        if name not in ("insight", "doctor", "cli"):
            assert "insight" not in imports(path), path


def test_live_and_decoding_do_not_import_training() -> None:
    for name, path in modules():
        if name in ("live", "decoding", "losses"):
            assert "training" not in imports(path), path
