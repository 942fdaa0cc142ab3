"""Settings: overrides, YAML text that is hostile or not plain, and names that changed since earlier versions."""

from pathlib import Path
from typing import ClassVar, Literal

import pytest

from arcuate.config import Settings, apply_override, known_paths, parse_settings, parse_yaml, read_yaml, settings_from
from arcuate.errors import UserError
from arcuate.experiments.recipe import Recipe, list_components


class Inner(Settings):
    renamed: ClassVar = {"rate": "lr"}
    renamed_values: ClassVar = {"schedule": {"anew": "restart"}}

    lr: float = 0.1
    schedule: Literal["restart", "continue"] = "restart"


class Outer(Settings):
    inner: Inner = Inner()


def test_a_renamed_setting_is_rejected_with_its_new_name() -> None:
    with pytest.raises(UserError, match="inner: rate is now called lr"):
        parse_settings(Outer, {"inner": {"rate": 0.5}}, "mine")
    with pytest.raises(UserError, match="schedule: anew is now called restart"):
        parse_settings(Outer, {"inner": {"schedule": "anew"}}, "mine")


def test_a_file_of_an_earlier_version_is_translated() -> None:
    old = {"inner": {"rate": 0.5, "schedule": "anew"}}
    assert parse_settings(Outer, old, "run", migrate=True) == Outer(inner=Inner(lr=0.5, schedule="restart"))


def _bomb(body: str) -> str:
    """Twenty-five lines, each of which holds the previous one twice."""
    lines = ["l0: &l0 {x: 1}"]
    lines += [f"l{i}: &l{i} " + body.replace("@", f"*l{i - 1}") for i in range(1, 25)]
    return "\n".join(lines)


HOSTILE_YAML = (
    "a: !!bool maybe",
    "a: !!int ''",
    "a: !!timestamp nope",
    "a: !!python/object/apply:os.system [x]",
    "a: 2024-99-99",
    "a: 0x_",
    _bomb("[@, @]"),
    _bomb("{<<: [@, @]}"),
    "&a [*a]",
    "[" * 100_000,
    "? [1, 2]\n: 3",
    "a: 1\na: 2",
    "x" * 600_000,
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
    text = "a: [1, 2.5, true, null, text, 1e-3]\nb: &b {c: 2023-08-11}\nd: {<<: *b, e: 1}\n"
    assert parse_yaml(text) == {
        "a": [1, 2.5, True, None, "text", "1e-3"],
        "b": {"c": "2023-08-11"},  # a session's name, not a date
        "d": {"c": "2023-08-11", "e": 1},
    }
    assert parse_yaml("") is None


def test_override_with_a_tag_is_text() -> None:
    tree: dict = {}
    apply_override(tree, "name=!!bool maybe")
    assert tree == {"name": "!!bool maybe"}


@pytest.mark.parametrize(
    "given",
    [Outer(inner=Inner(lr=0.5)), {"inner.lr": 0.5}, {"inner": {"lr": 0.5}}, ["inner.lr=0.5"], ["inner.lr=5e-1"]],
)
def test_settings_are_given_as_such_as_a_mapping_or_as_text(given: object) -> None:
    assert settings_from(Outer, given, "inner.lr=1") == Outer(inner=Inner(lr=0.5))
    assert settings_from(Outer, None, "inner.lr=1") == Outer()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["inner.lr"], "--set 'inner.lr' is not of the form key=value, such as inner.lr=1"),
        ({"inner.lrr": 1}, "did you mean inner.lr?"),
        ({"inner.lr": "fast"}, "inner.lr: .*; known settings are inner.lr, inner.schedule"),
        ("inner.lr=1", "must be a mapping or a list"),
    ],
)
def test_invalid_overrides_are_explained(given: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_from(Outer, given, "inner.lr=1")


def test_a_setting_of_another_option_cannot_be_overridden() -> None:
    with pytest.raises(UserError, match="already given by --adapt"):
        settings_from(Inner, ["schedule=restart"], "lr=1", {"schedule": "continue"})


def test_every_setting_is_listed_with_a_description() -> None:
    settings = [setting for part in list_components() for setting in part.settings]
    paths = known_paths(Recipe)
    assert {s.path for s in settings} == {p for p in paths if not any(q.startswith(f"{p}.") for q in paths)}
    assert [s.path for s in settings if not s.meaning] == []
