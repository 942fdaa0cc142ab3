"""Compiled reading of n-gram lines: a probability, words, perhaps a back-off."""

import numpy as np
from numba import njit

from arcuate.lm.vocabulary import find_word

NEWLINE, BACKSLASH = 10, 92
OK, BAD_NUMBER, TOO_FEW, TOO_MANY = 0, 1, 2, 3


@njit(cache=True)
def parse_lines(
    text: np.ndarray,
    at: int,
    line: int,
    order: int,
    numbers: np.ndarray,
    spans: np.ndarray,
    lines: np.ndarray,
) -> tuple[int, int, int, int]:
    """Read n-gram lines from `at` to the end of the text or a line that starts with a backslash.

    Fills numbers (n, 2) with probability and back-off as the file has them, spans (n, order, 2) with where the
    words stand, lines (n,) with line numbers. Gives (n, where it stopped, lines passed, what was wrong).
    """
    n = 0
    size = text.shape[0]
    while at < size and n < numbers.shape[0]:
        end = at
        while end < size and text[end] != NEWLINE:
            end += 1
        start = skip_space(text, at, end)
        if start < end:
            if text[start] == BACKSLASH:
                return n, at, line, OK
            problem = parse_line(text, start, end, order, numbers[n], spans[n])
            if problem != OK:
                return n, at, line, problem
            lines[n] = line
            n += 1
        at = end + 1
        line += 1
    return n, min(at, size), line, OK


@njit(cache=True)
def parse_line(
    text: np.ndarray, at: int, end: int, order: int, numbers: np.ndarray, spans: np.ndarray
) -> int:
    stop = token_end(text, at, end)
    good, numbers[0] = parse_number(text, at, stop)
    if not good:
        return BAD_NUMBER
    for i in range(order):
        at = skip_space(text, stop, end)
        if at == end:
            return TOO_FEW
        stop = token_end(text, at, end)
        spans[i, 0] = at
        spans[i, 1] = stop
    numbers[1] = 0.0
    at = skip_space(text, stop, end)
    if at < end:
        stop = token_end(text, at, end)
        good, numbers[1] = parse_number(text, at, stop)
        if not good:
            return BAD_NUMBER
        if skip_space(text, stop, end) < end:
            return TOO_MANY
    return OK


@njit(cache=True)
def skip_space(text: np.ndarray, at: int, end: int) -> int:
    while at < end and (text[at] == 32 or 9 <= text[at] <= 13):
        at += 1
    return at


@njit(cache=True)
def token_end(text: np.ndarray, at: int, end: int) -> int:
    while at < end and not (text[at] == 32 or 9 <= text[at] <= 13):
        at += 1
    return at


@njit(cache=True)
def parse_number(text: np.ndarray, at: int, end: int) -> tuple[bool, float]:
    """A decimal number or -inf; (False, 0) where it is neither."""
    negative = at < end and text[at] == 45
    if at < end and (text[at] == 45 or text[at] == 43):
        at += 1
    if end - at == 3 and text[at] | 32 == 105 and text[at + 1] | 32 == 110 and text[at + 2] | 32 == 102:
        return negative, -np.inf
    mantissa, n_digits, exponent, seen_point = 0.0, 0, 0, False
    while at < end:
        c = text[at]
        if c == 46 and not seen_point:
            seen_point = True
        elif 48 <= c <= 57:
            mantissa = mantissa * 10.0 + (c - 48)
            n_digits += 1
            if seen_point:
                exponent -= 1
        else:
            break
        at += 1
    if n_digits == 0:
        return False, 0.0
    if at < end:
        if text[at] | 32 != 101:
            return False, 0.0
        good, power = parse_power(text, at + 1, end)
        if not good:
            return False, 0.0
        exponent += power
    value = mantissa * 10.0**exponent if exponent > 0 else mantissa / 10.0 ** (-exponent)
    if not np.isfinite(value):
        return False, 0.0
    return True, -value if negative else value


@njit(cache=True)
def parse_power(text: np.ndarray, at: int, end: int) -> tuple[bool, int]:
    negative = at < end and text[at] == 45
    if at < end and (text[at] == 45 or text[at] == 43):
        at += 1
    if at >= end or end - at > 3:
        return False, 0
    power = 0
    for i in range(at, end):
        if not 48 <= text[i] <= 57:
            return False, 0
        power = power * 10 + (text[i] - 48)
    return True, -power if negative else power


@njit(cache=True)
def look_up(
    text: np.ndarray,
    spans: np.ndarray,
    blob: np.ndarray,
    offsets: np.ndarray,
    slots: np.ndarray,
    ids: np.ndarray,
) -> int:
    """Word ids (n, order) of spans; gives the first row with a word that is not in the vocabulary, or -1."""
    for i in range(spans.shape[0]):
        for j in range(spans.shape[1]):
            word = find_word(text, spans[i, j, 0], spans[i, j, 1], blob, offsets, slots)
            if word < 0:
                return i
            ids[i, j] = word
    return -1


@njit(cache=True)
def gather(text: np.ndarray, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of spans (n, 2) one after another, and the length of each."""
    lengths = spans[:, 1] - spans[:, 0]
    blob = np.empty(lengths.sum(), np.uint8)
    at = 0
    for i in range(spans.shape[0]):
        for j in range(spans[i, 0], spans[i, 1]):
            blob[at] = text[j]
            at += 1
    return blob, lengths
