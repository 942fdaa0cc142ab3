"""Session dates and electrode arrays: facts in names and channel numbers that several packages use."""

import pytest

from arcuate.data.electrodes import list_arrays, list_features
from arcuate.data.trial import (
    days_between,
    days_since_first,
    nearest_session,
    session_date,
    session_order,
)
from arcuate.errors import UserError

KNOWN = ("t15.2023.08.11", "t15.2023.08.17", "t15.2023.09.04")


@pytest.mark.parametrize("name", ["t15.2023.08.11", "2023-08-11", "x 2023/8/11", "t15_20230811"])
def test_the_date_in_a_name(name: str) -> None:
    assert str(session_date(name)) == "2023-08-11"


@pytest.mark.parametrize("name", ["", "t15", "2023.13.45", "12023.08.11", "2023.08.111", "120230811"])
def test_names_without_a_date(name: str) -> None:
    assert session_date(name) is None


def test_sessions_without_a_date_come_last() -> None:
    names = ["monday", "t15.2023.09.04", "t12.2022.04.28", "t15.2023.08.11"]
    assert sorted(names, key=session_order) == [names[2], names[3], names[1], names[0]]


def test_gaps_in_days() -> None:
    assert (days_between(KNOWN[1], KNOWN[0]), days_between(KNOWN[0], KNOWN[1])) == (6, -6)
    assert days_between("monday", KNOWN[0]) is None
    assert days_since_first(["monday", *KNOWN]) == [None, 0, 6, 24]
    assert days_since_first(["monday"]) == [None]


def test_the_nearest_session() -> None:
    assert nearest_session("t15.2023.08.13", KNOWN) == "t15.2023.08.11"
    assert nearest_session("t15.2023.08.14", KNOWN) == "t15.2023.08.11"  # the earlier of two
    assert nearest_session("t15.2023.08.14", KNOWN[::-1]) == "t15.2023.08.11"
    assert nearest_session("t15.2024.01.01", KNOWN) == "t15.2023.09.04"
    assert nearest_session("monday", KNOWN) == "t15.2023.09.04"
    with pytest.raises(UserError, match="no session layer"):
        nearest_session("monday", ())


def test_arrays_have_crossings_and_power_of_the_same_electrodes() -> None:
    arrays = list_arrays("b2t25", 512)
    assert [array.name for array in arrays] == ["ventral 6v", "area 4", "55b", "dorsal 6v"]
    assert arrays[1].channels.tolist() == [*range(64, 128), *range(320, 384)]
    assert [array.channels.size for array in list_arrays("b2t24", 256)] == [128, 128]
    assert [feature.channels for feature in list_features(6)] == [range(3), range(3, 6)]


@pytest.mark.parametrize("n_channels", [7, 6])
def test_too_few_channels_are_one_array(n_channels: int) -> None:
    (array,) = list_arrays("b2t25", n_channels)
    assert array.channels.tolist() == list(range(n_channels))
