"""Differences in words: what was found, how large, how sure, and what was not asked."""

from arcuate.paired import Contrast

ALPHA = 0.05


def points(rate: float, digits: int = 1) -> str:
    """A difference of error rates in points of per cent, without its sign."""
    return f"{abs(100 * rate):.{digits}f}"


def interval(c: Contrast) -> str:
    """The interval of the size of the difference, in points: how much better, or how much worse."""
    low, high = (c.low, c.high) if c.estimate >= 0 else (-c.high, -c.low)
    return f"{100 * low:.1f} to {100 * high:.1f}".replace("-", "−")


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.3f}"


def compared_sentence(b: str, a: str, c: Contrast, p_adjusted: float, n_asked: int) -> str:
    """Whether B is better than A, in one or two plain sentences."""
    level = f"{100 * c.level:.0f} % interval"
    counted = (
        f", {p_text(p_adjusted)} adjusted for {n_asked} comparisons" if n_asked > 1 else f", {p_text(c.p)}"
    )
    if c.estimate == 0 and c.low == c.high == 0:
        return f"{b} and {a} make the same number of errors in every trial."
    size = f"({level} {interval(c)} points{counted})"
    found = f"PER is {'lower' if c.estimate < 0 else 'higher'} by {points(c.estimate)} points"
    if p_adjusted < ALPHA:
        side = "better" if c.estimate < 0 else "worse"
        sentence = f"{b} is {side} than {a} by {points(c.estimate)} points of PER {size}."
    elif c.p < ALPHA:
        sentence = (
            f"No evidence of a difference between {b} and {a} once {n_asked} comparisons are accounted for:"
            f" {found} {size}."
        )
    else:
        sentence = f"No evidence of a difference between {b} and {a}: {found} {size}."
    return sentence + caveat(c)


def caveat(c: Contrast) -> str:
    """What the interval does not cover."""
    if not c.seeds_counted:
        return " One run a side: whether another seed would say the same was not asked."
    if min(c.n_runs) == 1:
        return " One side has a single run; its spread over seeds is taken from the other."
    return ""


def method(c: Contrast) -> str:
    """How the interval came about, for the small print."""
    drawn = f"{c.n_trials} trials" if c.over == "trials" else f"the sessions of {c.n_trials} trials"
    if c.method == "bootstrap":
        return f"Paired bootstrap over {drawn}; PER is summed edits over summed lengths."
    runs = " and ".join(str(n) for n in c.n_runs)
    seeds = f", and over seeds ({runs} runs)" if c.seeds_counted else ""
    spread = f"Variance over {drawn}{seeds}, t with {c.df:.1f} degrees of freedom"
    return f"{spread}; PER is summed edits over summed lengths."
