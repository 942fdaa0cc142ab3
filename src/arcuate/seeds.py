"""Seeds derived from what a draw belongs to, so that order, workers and processes change nothing."""

import hashlib

MASK = (1 << 63) - 1


def derive(*parts: int | str) -> int:
    """A 63-bit seed from these parts; equal parts give equal seeds on every machine."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & MASK
