"""Faults in the input: each is reported and handled; no input stops a stream."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from arcuate.live.input import Chunk, InputValidator, ValidatedBins
from support.cases import cases
from support.live_parts import bins


def validator() -> InputValidator:
    return InputValidator(6)


def kinds(validated: ValidatedBins) -> list[tuple[str, str]]:
    return [(fault.kind, fault.action) for fault in validated.faults]


def test_bins_with_a_wrong_channel_count_are_dropped() -> None:
    validated = validator().validate(Chunk(bins(3, 5)))
    assert len(validated.bins) == 0 and kinds(validated) == [("channels", "dropped")]
    assert "expected bins of 6 channels, got an array of 3x5" in validated.faults[0].message


def test_non_finite_values_are_replaced() -> None:
    checks = validator()
    checks.validate(Chunk(np.full((1, 6), 7.0)))
    broken = bins(3)
    broken[0, 2] = np.nan
    broken[1, 2] = np.inf
    validated = checks.validate(Chunk(broken))
    assert validated.bins[0, 2] == validated.bins[1, 2] == 7.0
    assert kinds(validated) == [("not_finite", "hold")]


def test_short_gaps_are_filled() -> None:
    checks = validator()
    checks.validate(Chunk(np.full((4, 6), 7.0), first=0))
    validated = checks.validate(Chunk(bins(2), first=7))
    assert validated.bins.shape == (5, 6) and (validated.bins[:3] == 7.0).all()
    assert kinds(validated) == [("gap", "hold")] and not validated.ends_sentence


def test_long_gaps_end_the_sentence() -> None:
    checks = validator()
    checks.validate(Chunk(bins(4), time_s=10.0))
    validated = checks.validate(Chunk(bins(4), time_s=11.0))
    assert validated.ends_sentence and len(validated.bins) == 4 and kinds(validated) == [("gap", "reset")]


def test_gaps_are_detected_by_timestamps() -> None:
    checks = validator()
    checks.validate(Chunk(bins(1), time_s=5.0))
    assert not checks.validate(Chunk(bins(1), time_s=5.025)).faults  # jitter
    assert kinds(checks.validate(Chunk(bins(1), time_s=5.145))) == [("gap", "hold")]


def test_a_clock_that_jumps_back_is_reported_and_accepted() -> None:
    checks = validator()
    checks.validate(Chunk(bins(1), time_s=100.0))
    assert kinds(checks.validate(Chunk(bins(1), time_s=50.0))) == [("clock", "hold")]
    assert not checks.validate(Chunk(bins(1), time_s=50.02)).faults


def test_repeated_bins_are_dropped() -> None:
    checks = validator()
    checks.validate(Chunk(bins(4), first=0))
    validated = checks.validate(Chunk(bins(4), first=2))
    assert len(validated.bins) == 2 and kinds(validated) == [("repeat", "dropped")]
    assert not checks.validate(Chunk(bins(1), first=6)).faults


def test_a_restarted_source_is_accepted() -> None:
    """Its bin numbers start again and must not count as repeats."""
    checks = validator()
    checks.validate(Chunk(bins(4), first=30_000))
    validated = checks.validate(Chunk(bins(4), first=0))
    assert len(validated.bins) == 4 and validated.ends_sentence and kinds(validated) == [("restart", "reset")]
    assert not checks.validate(Chunk(bins(4), first=4)).faults


def test_values_beyond_the_maximum_are_replaced() -> None:
    checks = validator()
    checks.validate(Chunk(np.full((1, 6), 7.0)))
    glitch = np.full((2, 6), -1e6)
    glitch[0, 1], glitch[0, 2], glitch[1, 3] = 1e300, -1.001e6, np.nan
    validated = checks.validate(Chunk(glitch))
    assert validated.bins[0, 1] == validated.bins[0, 2] == 7.0 and (validated.bins[:, 0] == -1e6).all()
    assert kinds(validated) == [("not_finite", "hold"), ("too_large", "hold")]  # 1e300 overflows


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


@settings(max_examples=cases(10))
@given(st.lists(chunks, max_size=20))
def test_validated_bins_are_finite_and_bounded(given_chunks):
    checks = validator()
    for chunk in given_chunks:
        validated = checks.validate(chunk)
        assert validated.bins.shape[1] == 6 and np.isfinite(validated.bins).all()
        assert len(validated.bins) <= len(chunk.bins) + 25  # filled gaps are at most 0.5 s
