"""Words per minute and bits per second."""

import math

import pytest

from arcuate.evaluation.rate import bits_per_symbol, communication_rate


@pytest.mark.parametrize(
    ("n", "p", "bits"), [(2, 1.0, 1.0), (4, 1.0, 2.0), (2, 0.5, 0.0), (40, 0.0, 0.0), (1, 1.0, 0.0)]
)
def test_bits_of_perfect_and_of_random_decoding(n: int, p: float, bits: float) -> None:
    assert bits_per_symbol(n, p) == pytest.approx(bits)


def test_bits_are_the_capacity_of_the_symmetric_channel() -> None:
    n, p = 40, 0.9
    entropy = -(p * math.log2(p) + (1 - p) * math.log2((1 - p) / (n - 1)))
    assert bits_per_symbol(n, p) == pytest.approx(math.log2(n) - entropy)
    assert bits_per_symbol(n, 0.8) < bits_per_symbol(n, p) < math.log2(n)


def test_rates_are_per_time_of_recording() -> None:
    rate = communication_rate(
        120.0, n_symbols=600, error_rate=0.1, n_classes=40, symbols="phonemes", n_words=100, word_error_rate=0.2
    )
    assert rate is not None
    assert rate.words_per_minute == pytest.approx(50.0)
    assert rate.correct_words_per_minute == pytest.approx(40.0)
    assert rate.bits_per_second == pytest.approx(5 * bits_per_symbol(40, 0.9))
    assert communication_rate(0.0, n_symbols=0, error_rate=None, n_classes=40, symbols="phonemes", n_words=0) is None
