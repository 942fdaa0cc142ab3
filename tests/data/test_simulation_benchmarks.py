"""The benchmark scripts that compare simulated with real recordings."""

import json
from pathlib import Path

import numpy as np
import pytest

from support.benchmarks import load


def test_counts_of_every_kind_of_error(tmp_path: Path) -> None:
    confusions = load("simulator_confusions")
    trials = [
        {"session": "a", "reference": ["B", "IY", "SIL"], "hypothesis": ["P", "IY", "SIL"]},
        {"session": "a", "reference": ["P", "IY", "SIL"], "hypothesis": ["B", "IY", "SIL", "SIL"]},
        {"session": "b", "reference": ["T", "UW", "SIL", "SIL"], "hypothesis": ["T", "SIL", "SIL"]},
    ]
    path = tmp_path / "val.jsonl"
    path.write_text("\n".join(json.dumps(trial) for trial in trials), encoding="utf-8")
    errors, by_session = confusions.read_results(path)
    assert errors.n_phonemes == 10
    assert [errors.rate(kind) for kind in "SDI"] == pytest.approx([0.2, 0.1, 0.1])
    assert errors.confusions() == {("B", "P"): 2}
    assert errors.per_phoneme()["UW"] == 1.0
    assert by_session == pytest.approx({"a": 3 / 6, "b": 1 / 4})
    assert "B–P" in confusions.report(errors, by_session, [errors])


@pytest.mark.parametrize(
    ("key", "expected"), [("T>D", ("T", "D")), ("<ins>>L", ("<ins>", "L")), ("EH><del>", ("EH", "<del>"))]
)
def test_reads_the_keys_of_the_real_tables(key: str, expected: tuple[str, str]) -> None:
    assert load("simulator_confusions").pair(key) == expected


def test_counts_come_back_from_z_scores() -> None:
    statistics = load("simulator_statistics")
    counts = np.random.default_rng(0).poisson(0.6, 300).astype(float)
    z = ((counts - counts.mean()) / counts.std()).astype(np.float32)
    np.testing.assert_array_equal(statistics.recover_counts(z), counts)


def test_every_statistic_has_a_simulated_value(tmp_path: Path) -> None:
    statistics = load("simulator_statistics")
    measured = statistics.describe_bins([np.random.default_rng(0).poisson(0.6, (200, 8)).astype(float)])
    measured |= statistics.describe_timing(np.array([300, 200, 250]), np.array([30, 20, 26]))
    left = set(statistics.PUBLISHED) - set(measured)
    assert left == {
        "power, coefficient of variation",
        "words per sentence",
        "phonemes per sentence",
        "trial length, bins",
    }
    assert measured["correlation of length with phonemes"] == "0.99"
