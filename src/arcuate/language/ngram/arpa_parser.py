"""Compiled parser of n-gram lines in ARPA files: `log10 probability, words, optional log10 back-off`.

The text is one uint8 array of complete lines. One pass over the bytes, O(length), without Python objects per line:
numbers go into a float64 array, words are stored as byte spans and looked up in the vocabulary afterwards.
"""

import numpy as np
from numba import njit

from arcuate.language.ngram.vocabulary import find_word

OK, BAD_NUMBER, TOO_FEW_WORDS, TOO_MANY_WORDS = 0, 1, 2, 3
_TAB, _NEWLINE, _CARRIAGE_RETURN, _SPACE, _PLUS, _MINUS, _POINT, _BACKSLASH = 9, 10, 13, 32, 43, 45, 46, 92
_DIGIT_0, _DIGIT_9 = 48, 57
_LOWER = 32  # c | 32 is the lower-case letter
_E, _F, _I, _N = 101, 102, 105, 110


@njit(cache=True)
def parse_lines(
    text: np.ndarray, at: int, line: int, order: int, numbers: np.ndarray, spans: np.ndarray, lines: np.ndarray
) -> tuple[int, int, int, int]:
    """Parse lines from `at` to the end of the text or a line that starts with a backslash.

    Fills numbers (n, 2) with probability and back-off as written, spans (n, order, 2) with the start and end of each
    word, and lines (n,) with line numbers. Returns (n, position, line number, status).
    """
    n = 0
    size = text.shape[0]
    while at < size and n < numbers.shape[0]:
        end = at
        while end < size and text[end] != _NEWLINE:
            end += 1
        start = _skip_space(text, at, end)
        if start < end:
            if text[start] == _BACKSLASH:
                return n, at, line, OK
            status = _parse_line(text, start, end, order, numbers[n], spans[n])
            if status != OK:
                return n, at, line, status
            lines[n] = line
            n += 1
        at = end + 1
        line += 1
    return n, min(at, size), line, OK


@njit(cache=True)
def _parse_line(text: np.ndarray, at: int, end: int, order: int, numbers: np.ndarray, spans: np.ndarray) -> int:
    stop = _field_end(text, at, end)
    good, numbers[0] = parse_number(text, at, stop)
    if not good:
        return BAD_NUMBER
    for i in range(order):
        at = _skip_space(text, stop, end)
        if at == end:
            return TOO_FEW_WORDS
        stop = _field_end(text, at, end)
        spans[i, 0] = at
        spans[i, 1] = stop
    numbers[1] = 0.0
    at = _skip_space(text, stop, end)
    if at < end:
        stop = _field_end(text, at, end)
        good, numbers[1] = parse_number(text, at, stop)
        if not good:
            return BAD_NUMBER
        if _skip_space(text, stop, end) < end:
            return TOO_MANY_WORDS
    return OK


@njit(cache=True)
def _skip_space(text: np.ndarray, at: int, end: int) -> int:
    while at < end and (text[at] == _SPACE or _TAB <= text[at] <= _CARRIAGE_RETURN):
        at += 1
    return at


@njit(cache=True)
def _field_end(text: np.ndarray, at: int, end: int) -> int:
    while at < end and not (text[at] == _SPACE or _TAB <= text[at] <= _CARRIAGE_RETURN):
        at += 1
    return at


@njit(cache=True)
def parse_number(text: np.ndarray, at: int, end: int) -> tuple[bool, float]:
    """Parse a decimal number or -inf; (False, 0) for anything else.

    The mantissa is accumulated as an integer-valued float and scaled once. Up to 15 digits and powers up to 10^22 are
    exact in float64, so such numbers are correctly rounded.
    """
    negative = at < end and text[at] == _MINUS
    if at < end and (text[at] == _MINUS or text[at] == _PLUS):
        at += 1
    if end - at == 3 and text[at] | _LOWER == _I and text[at + 1] | _LOWER == _N and text[at + 2] | _LOWER == _F:
        return negative, -np.inf
    mantissa, n_digits, exponent, seen_point = 0.0, 0, 0, False
    while at < end:
        c = text[at]
        if c == _POINT and not seen_point:
            seen_point = True
        elif _DIGIT_0 <= c <= _DIGIT_9:
            mantissa = mantissa * 10.0 + (c - _DIGIT_0)
            n_digits += 1
            if seen_point:
                exponent -= 1
        else:
            break
        at += 1
    if n_digits == 0:
        return False, 0.0
    if at < end:
        if text[at] | _LOWER != _E:
            return False, 0.0
        good, power = _parse_exponent(text, at + 1, end)
        if not good:
            return False, 0.0
        exponent += power
    value = mantissa * 10.0**exponent if exponent > 0 else mantissa / 10.0 ** (-exponent)
    if not np.isfinite(value):
        return False, 0.0
    return True, -value if negative else value


@njit(cache=True)
def _parse_exponent(text: np.ndarray, at: int, end: int) -> tuple[bool, int]:
    negative = at < end and text[at] == _MINUS
    if at < end and (text[at] == _MINUS or text[at] == _PLUS):
        at += 1
    if at >= end or end - at > 3:
        return False, 0
    power = 0
    for i in range(at, end):
        if not _DIGIT_0 <= text[i] <= _DIGIT_9:
            return False, 0
        power = power * 10 + (text[i] - _DIGIT_0)
    return True, -power if negative else power


@njit(cache=True)
def find_words(
    text: np.ndarray, spans: np.ndarray, blob: np.ndarray, offsets: np.ndarray, slots: np.ndarray, ids: np.ndarray
) -> int:
    """Write the word ids (n, order) of spans; return the first row with an unknown word, or -1."""
    for i in range(spans.shape[0]):
        for j in range(spans.shape[1]):
            word = find_word(text, spans[i, j, 0], spans[i, j, 1], blob, offsets, slots)
            if word < 0:
                return i
            ids[i, j] = word
    return -1


@njit(cache=True)
def copy_spans(text: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenated bytes of spans (n, 2), and the length of each."""
    lengths = spans[:, 1] - spans[:, 0]
    blob = np.empty(lengths.sum(), np.uint8)
    at = 0
    for i in range(spans.shape[0]):
        for j in range(spans[i, 0], spans[i, 1]):
            blob[at] = text[j]
            at += 1
    return blob, lengths
