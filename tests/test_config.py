"""Settings given as overrides; and renamed settings, translated in files of earlier versions and refused elsewhere."""

from typing import ClassVar, Literal

import pytest

from arcuate.config import Settings, parse_settings, settings_from
from arcuate.errors import UserError


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
