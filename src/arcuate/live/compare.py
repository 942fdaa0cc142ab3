"""Texts side by side: other readings of a word, and errors against what was meant."""

from collections.abc import Sequence
from typing import Any

from rapidfuzz.distance import Levenshtein

from arcuate.text import normalise_text


def alternatives(words: Sequence[str], readings: Sequence[Sequence[str]]) -> dict[int, list[str]]:
    """For the place of each word what other readings have there, best reading first."""
    found: dict[int, list[str]] = {}
    for reading in readings:
        for op in Levenshtein.opcodes(words, reading):
            if op.tag != "replace":
                continue
            width, other = op.src_end - op.src_start, reading[op.dest_start : op.dest_end]
            for k in range(width):  # one word against one; what is left over goes to the last place
                said = " ".join(other[k:] if k == width - 1 else other[k : k + 1])
                places = found.setdefault(op.src_start + k, [])
                if said and said not in places:
                    places.append(said)
    return found


def against(reference: str | None, words: Sequence[str]) -> list[dict[str, Any]] | None:
    """The decoded words marked right, wrong (with what was meant) or extra, and the missing ones between them."""
    if reference is None:
        return None
    meant = normalise_text(reference).split()
    marked: list[dict[str, Any]] = []
    for op in Levenshtein.opcodes(meant, [normalise_text(word) for word in words]):
        source, target = meant[op.src_start : op.src_end], words[op.dest_start : op.dest_end]
        if op.tag == "equal":
            marked += [{"word": word, "is": "right"} for word in target]
        elif op.tag == "delete":
            marked += [{"word": word, "is": "missing"} for word in source]
        elif op.tag == "insert":
            marked += [{"word": word, "is": "extra"} for word in target]
        else:
            marked += [
                {"word": word, "is": "wrong", "meant": said}
                for said, word in zip(source, target, strict=True)
            ]
    return marked
