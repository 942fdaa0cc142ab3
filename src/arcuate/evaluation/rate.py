"""Communication rate: words per minute and bits per second.

Bits per symbol (Wolpaw et al. 1998): with N equally probable symbols, of which a fraction P is decoded correctly, and
errors distributed evenly over the others,

    B = log2 N + P log2 P + (1 - P) log2((1 - P) / (N - 1)),

and 0 if P is at most 1 / N. Bits per second are B times symbols per second of recording. P is 1 - error rate. Language
is not uniform, so B is an upper bound for comparisons between systems with the same N, not the information of the text.
"""

import math
from dataclasses import dataclass
from typing import Any

from arcuate.files import fields_to_dict


@dataclass(frozen=True)
class CommunicationRate:
    """Communication rate of decoded speech, relative to the duration of the recordings."""

    seconds: float  # total duration of the recordings
    words_per_minute: float | None  # in the reference texts; None without texts
    correct_words_per_minute: float | None  # times (1 - WER); None without decoded words
    bits_per_second: float | None
    bits_per_symbol: float | None
    symbols: str  # phonemes or words
    n_classes: int

    def summary(self) -> str:
        """The rate in one sentence."""
        parts = []
        if self.words_per_minute is not None:
            parts.append(f"{self.words_per_minute:.1f} words per minute")
        if self.correct_words_per_minute is not None:
            parts.append(f"{self.correct_words_per_minute:.1f} of them correct")
        if self.bits_per_second is not None:
            parts.append(f"{self.bits_per_second:.1f} bits per second from {self.symbols}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


def bits_per_symbol(n_classes: int, accuracy: float) -> float:
    """Information per symbol in bits (Wolpaw et al. 1998)."""
    if n_classes < 2:
        return 0.0
    p = min(1.0, accuracy)
    if p <= 1 / n_classes:
        return 0.0
    bits = math.log2(n_classes) + p * math.log2(p)
    return bits + ((1 - p) * math.log2((1 - p) / (n_classes - 1)) if p < 1.0 else 0.0)


def communication_rate(
    seconds: float,
    *,
    n_symbols: int,
    error_rate: float | None,
    n_classes: int,
    symbols: str,
    n_words: int | None,
    word_error_rate: float | None = None,
) -> CommunicationRate | None:
    """Rate of trials with a total duration of `seconds`; None without trials."""
    if seconds <= 0:
        return None
    per_minute = None if not n_words else 60 * n_words / seconds
    correct = None
    if per_minute is not None and word_error_rate is not None:
        correct = per_minute * max(0.0, 1 - word_error_rate)
    bits = None if error_rate is None else bits_per_symbol(n_classes, 1 - error_rate)
    per_second = None if bits is None else bits * n_symbols / seconds
    return CommunicationRate(seconds, per_minute, correct, per_second, bits, symbols, n_classes)
