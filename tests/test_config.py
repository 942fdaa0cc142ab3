"""Settings that were renamed: refused in recipes with the new name, translated in files of earlier versions."""

from typing import ClassVar, Literal

import pytest

from arcuate.config import Settings, parse_settings
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
