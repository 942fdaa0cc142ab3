"""Helpers of the cli tests."""

import json

import pytest

from support.command import Done


def one_object(text: str) -> dict:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return json.loads(lines[0], parse_constant=lambda c: pytest.fail(f"{c} in JSON"))


def assert_refused(done: Done, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr, done.stderr


NO_TORCH = """
import sys
from arcuate.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
assert "torch" not in sys.modules, "torch was imported"
"""
