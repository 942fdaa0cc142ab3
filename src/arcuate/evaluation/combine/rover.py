"""ROVER: candidates aligned word by word into slots, and a weighted vote in each slot."""

from collections.abc import Sequence

import numpy as np

from arcuate.evaluation.combine.mbr import expected_errors

NOTHING = ""  # a slot's vote for no word at all
Slot = dict[str, float]  # word -> weight of its votes


def rover(texts: Sequence[str], weights: Sequence[float] | np.ndarray | None = None) -> str:
    """The words that win their slots; ties go to the candidate of least risk, which the others are aligned to."""
    if not texts:
        return ""
    shares = np.ones(len(texts)) if weights is None else np.asarray(weights, dtype=np.float64)
    found = expected_errors(texts, shares)
    backbone = found.best
    order = [backbone, *(i for i in range(len(found.texts)) if i != backbone)]
    slots: list[Slot] = []
    voted = 0.0
    for i in order:
        weight = float(found.weights[i])
        slots = align(slots, found.texts[i].split(), weight, voted)
        voted += weight
    winners = [max(slot, key=lambda word: round(slot[word], 9)) for slot in slots]  # the first of equals
    return " ".join(word for word in winners if word != NOTHING)


def align(slots: list[Slot], words: Sequence[str], weight: float, voted: float) -> list[Slot]:
    """The slots with one more candidate's votes; a word without a slot opens one that all before left empty.

    A word costs the share of votes that its slot did not give it, so that slots are matched by what most said.
    """
    n, m = len(slots), len(words)
    cost = np.empty((n + 1, m + 1))
    cost[0] = np.arange(m + 1)
    for i, slot in enumerate(slots, start=1):
        total = sum(slot.values())
        skip = 1 - slot.get(NOTHING, 0.0) / total
        cost[i, 0] = cost[i - 1, 0] + skip
        for j, word in enumerate(words, start=1):
            said = 1 - slot.get(word, 0.0) / total
            cost[i, j] = min(cost[i - 1, j - 1] + said, cost[i - 1, j] + skip, cost[i, j - 1] + 1)
    return trace(slots, words, weight, voted, cost)


def trace(
    slots: list[Slot], words: Sequence[str], weight: float, voted: float, cost: np.ndarray
) -> list[Slot]:
    """Follow the cheapest alignment back, adding the votes."""
    i, j = len(slots), len(words)
    merged: list[Slot] = []
    while i or j:
        slot = slots[i - 1] if i else {}
        total = sum(slot.values()) or 1.0
        if i and j and np.isclose(cost[i, j], cost[i - 1, j - 1] + 1 - slot.get(words[j - 1], 0.0) / total):
            merged.append(with_vote(slot, words[j - 1], weight))
            i, j = i - 1, j - 1
        elif i and np.isclose(cost[i, j], cost[i - 1, j] + 1 - slot.get(NOTHING, 0.0) / total):
            merged.append(with_vote(slot, NOTHING, weight))
            i -= 1
        else:
            opened: Slot = {NOTHING: voted} if voted else {}
            merged.append(with_vote(opened, words[j - 1], weight))
            j -= 1
    return merged[::-1]


def with_vote(slot: Slot, word: str, weight: float) -> Slot:
    return {**slot, word: slot.get(word, 0.0) + weight}
