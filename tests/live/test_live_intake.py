"""Faults of the input: each is told and has a defined answer; nothing that comes in stops a stream."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.live.config import Faults
from arcuate.live.input_checks import ValidatedBins, InputValidator
from arcuate.live.messages import Chunk
from support.live_parts import bins


def intake(**settings: object) -> InputValidator:
    return InputValidator(6, Faults(**settings))


def kinds(admitted: ValidatedBins) -> list[tuple[str, str]]:
    return [(fault.kind, fault.action) for fault in admitted.faults]


def test_wrong_channel_count_is_dropped_and_told() -> None:
    admitted = intake().validate(Chunk(bins(3, 5)))
    assert len(admitted.bins) == 0 and kinds(admitted) == [("channels", "dropped")]
    assert "3x5 values where the model reads 6 channels" in admitted.faults[0].what


@pytest.mark.parametrize(("how", "value"), [("hold", 7.0), ("zero", 0.0)])
def test_values_that_are_not_finite_are_held_or_zero(how: str, value: float) -> None:
    door = intake(not_finite=how)
    door.validate(Chunk(np.full((1, 6), 7.0)))
    broken = bins(3)
    broken[0, 2] = np.nan
    broken[1, 2] = np.inf
    admitted = door.validate(Chunk(broken))
    assert admitted.bins[0, 2] == admitted.bins[1, 2] == value
    assert kinds(admitted) == [("not_finite", how)]


@pytest.mark.parametrize(("how", "filling"), [("hold", 7.0), ("zero", 0.0)])
def test_short_gaps_are_filled(how: str, filling: float) -> None:
    door = intake(gap=how)
    door.validate(Chunk(np.full((4, 6), 7.0), first=0))
    admitted = door.validate(Chunk(bins(2), first=7))
    assert admitted.bins.shape == (5, 6) and (admitted.bins[:3] == filling).all()
    assert kinds(admitted) == [("gap", how)] and not admitted.ends_sentence


def test_long_gaps_end_the_sentence() -> None:
    door = intake(max_gap_s=0.5)
    door.validate(Chunk(bins(4), time_s=10.0))
    admitted = door.validate(Chunk(bins(4), time_s=11.0))
    assert admitted.ends_sentence and len(admitted.bins) == 4 and kinds(admitted) == [("gap", "reset")]


def test_gaps_are_noticed_by_the_clock_too() -> None:
    door = intake()
    door.validate(Chunk(bins(1), time_s=5.0))
    assert not door.validate(Chunk(bins(1), time_s=5.025)).faults  # jitter
    assert kinds(door.validate(Chunk(bins(1), time_s=5.145))) == [("gap", "hold")]


def test_a_clock_that_goes_back_is_told_and_followed() -> None:
    door = intake()
    door.validate(Chunk(bins(1), time_s=100.0))
    assert kinds(door.validate(Chunk(bins(1), time_s=50.0))) == [("clock", "hold")]
    assert not door.validate(Chunk(bins(1), time_s=50.02)).faults


def test_bins_that_came_before_are_left_out() -> None:
    door = intake()
    door.validate(Chunk(bins(4), first=0))
    admitted = door.validate(Chunk(bins(4), first=2))
    assert len(admitted.bins) == 2 and kinds(admitted) == [("repeat", "dropped")]
    assert not door.validate(Chunk(bins(1), first=6)).faults


def test_a_source_that_was_started_again_is_heard() -> None:
    """Its numbers begin anew; they must not count as bins that came before."""
    door = intake()
    door.validate(Chunk(bins(4), first=30_000))
    admitted = door.validate(Chunk(bins(4), first=0))
    assert len(admitted.bins) == 4 and admitted.ends_sentence and kinds(admitted) == [("restart", "reset")]
    assert not door.validate(Chunk(bins(4), first=4)).faults


@pytest.mark.parametrize(("how", "value"), [("hold", 7.0), ("zero", 0.0)])
def test_values_that_nothing_can_measure_are_no_measurements(how: str, value: float) -> None:
    door = intake(not_finite=how, max_value=1000.0)
    door.validate(Chunk(np.full((1, 6), 7.0)))
    glitch = np.full((2, 6), -1000.0)
    glitch[0, 1], glitch[0, 2], glitch[1, 3] = 1e300, -1001.0, np.nan
    admitted = door.validate(Chunk(glitch))
    assert admitted.bins[0, 1] == admitted.bins[0, 2] == value and (admitted.bins[:, 0] == -1000).all()
    assert kinds(admitted) == [("not_finite", how), ("too_large", how)]  # 1e300 is no float32


chunks = st.builds(
    lambda n, c, first, time_s, hole: Chunk(broken(n, c, hole), time_s, first),
    st.integers(0, 5),
    st.sampled_from([6, 6, 6, 5]),
    st.none() | st.integers(0, 200),
    st.none() | st.floats(-1e9, 1e9) | st.floats(allow_nan=True),
    st.booleans(),
)


def broken(n: int, n_channels: int, hole: bool) -> np.ndarray:
    values = bins(n, n_channels)
    if hole and n:
        values[-1, 0] = np.nan
    return values


@settings(max_examples=200, deadline=None)
@given(st.lists(chunks, max_size=20), st.sampled_from(["hold", "zero", "reset"]))
def test_whatever_comes_in_what_is_decoded_is_finite_and_bounded(given_chunks, gap):
    door = intake(gap=gap)
    for chunk in given_chunks:
        admitted = door.validate(chunk)
        assert admitted.bins.shape[1] == 6 and np.isfinite(admitted.bins).all()
        assert len(admitted.bins) <= len(chunk.bins) + 25  # a gap that is filled is at most 0.5 s
