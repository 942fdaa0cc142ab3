"""Settings: overrides, and YAML text that is hostile, not plain, or not what it looks like."""

from pathlib import Path
from typing import Literal

import pytest

from arcuate.config import (
    Settings,
    apply_overrides,
    known_paths,
    parse_settings,
    parse_yaml,
    read_yaml,
    to_yaml,
)
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe
from arcuate.experiments.settings_page import list_components


class Inner(Settings):
    lr: float = 0.1
    schedule: Literal["restart", "continue"] = "restart"


class Outer(Settings):
    inner: Inner = Inner()
    name: str = ""


HOSTILE_YAML = (
    "a: !!bool maybe",
    "a: !!int ''",
    "a: !!python/object/apply:os.system [x]",
    "l0: &l0 {x: 1}\nl1: {y: 2}",
    "a: {<<: *b}",
    "&a [*a]",
    "[" * 100_000,
    "? [1, 2]\n: 3",
    "a: 1\na: 2",
    "x" * 600_000,
    "1" * 5_000,
    "\x00",
    'a: "b\\0c"',
    'a: "\\ud800"',
)


@pytest.mark.parametrize("text", HOSTILE_YAML, ids=lambda text: text[:20].replace("\x00", "NUL"))
def test_hostile_yaml_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(UserError, match=r"file\.yaml is not valid YAML: .{5,300}$"):
        read_yaml(tmp_path / "file.yaml")


def test_plain_yaml() -> None:
    text = "a: [1, 2.5, true, null, text, 1e-3, 0, -7]\nb: {c: 2023-08-11, t: 2024-99-99}\n"
    assert parse_yaml(text) == {
        "a": [1, 2.5, True, None, "text", "1e-3", 0, -7],
        "b": {"c": "2023-08-11", "t": "2024-99-99"},  # names of sessions, not dates
    }
    assert parse_yaml("") is None
    deceptive = ["010", "190:20:30", "1:30.5", "yes", "Off", "0x10", "="]  # YAML 1.1 reads none of these as text
    assert parse_yaml(f"[{', '.join(deceptive)}]") == deceptive


@pytest.mark.parametrize("name", ["010", "yes", "1:20", "2023-08-11", "1e5", "null", "a: b", "&x", ""])
def test_text_of_any_form_is_read_as_it_was_written(name: str) -> None:
    assert parse_settings(Outer, parse_yaml(to_yaml(Outer(name=name))), "x") == Outer(name=name)


def test_overrides() -> None:
    tree: dict = {}
    apply_overrides(tree, ["a.b=1e4", "a.c=[1, x]", "name=!!bool maybe", "day=010", "note=a: b: c"])
    assert tree == {"a": {"b": 10_000.0, "c": [1, "x"]}, "name": "!!bool maybe", "day": "010", "note": "a: b: c"}
    for override, message in (("a.b", "form key.sub=value"), ("a..b=1", "form key.sub")):
        with pytest.raises(UserError, match=message):
            apply_overrides({}, [override])


def test_every_setting_is_listed_with_a_description() -> None:
    settings = [setting for part in list_components() for setting in part.settings]
    paths = known_paths(Recipe)
    assert {s.path for s in settings} == {p for p in paths if not any(q.startswith(f"{p}.") for q in paths)}
    assert [s.path for s in settings if not s.meaning] == []
