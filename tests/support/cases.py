"""How many random examples a test tries: `pytest --cases N`."""

USUAL = 20

_tried = USUAL


def set_cases(n: int) -> None:
    global _tried
    _tried = n


def cases(share: float = 1.0) -> int:
    """The number of examples, or that share of it for a test whose examples are cheap or expensive."""
    return max(1, round(_tried * share))


def many() -> bool:
    """Whether more is tried than usual, so that totals are worth printing."""
    return _tried > USUAL
