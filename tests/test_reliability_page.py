"""Every promise of docs/reliability.md and docs/security.md names tests that exist; so does every other page."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [(ROOT / "docs" / name).read_text("utf-8") for name in ("reliability.md", "security.md")]


def promises() -> Iterator[tuple[str, str]]:
    """Rows of the tables that have a column `test`: promise, and the cell with its tests."""
    column = None
    for line in "\n\n".join(PAGES).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if "test" in cells:
            column = cells.index("test")
        elif not cells:
            column = None
        elif column is not None and not set(line) <= set("|-: "):
            yield cells[0], cells[column]


ROWS = list(promises())
DEFINED = {
    name: path
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
}


def test_the_tables_are_found() -> None:
    assert len(ROWS) > 25


@pytest.mark.parametrize(("promise", "tests"), ROWS, ids=[promise[:60] for promise, _ in ROWS])
def test_a_promise_has_tests_that_exist(promise: str, tests: str) -> None:
    names = re.findall(r"`([^`]+)`", tests)
    assert names, f"{promise}: no test"
    for name in names:
        exists = (ROOT / name).exists() if "/" in name else name in DEFINED
        assert exists, f"{promise}: {name} does not exist"


def test_tests_named_in_the_text_exist() -> None:
    pages = [path.read_text("utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page)}
    paths = {path for page in pages for path in re.findall(r"\b((?:tests|benchmarks)/[\w/]+\.py)\b", page)}
    assert len(paths) > 30
    assert sorted(named - DEFINED.keys()) == [] and [path for path in sorted(paths) if not (ROOT / path).exists()] == []
