"""What the doctor says of a log: one verdict first, others that also hold, and why."""

from dataclasses import asdict, dataclass, field
from typing import Any

VERDICTS = (
    *("restarted", "exploded", "too_short", "collapsed", "degraded", "overfit", "plateaued", "unfinished"),
    "healthy",
)  # where several hold, the first of them in this order leads


@dataclass(frozen=True)
class Cause:
    """A likely cause, what speaks for it, and the change of settings that would test it."""

    cause: str
    because: str
    change: str


@dataclass(frozen=True)
class Diagnosis:
    """One log judged; `runs` holds each run of a file that has several."""

    primary: str
    secondary: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    since_step: int | None = (
        None  # from where on the verdict holds; of several runs, the last step of the first
    )
    best_per: float | None = None
    best_step: int | None = None
    last_per: float | None = None
    last_step: int | None = None
    causes: tuple[Cause, ...] = ()
    suggestion: str = ""
    runs: tuple["Diagnosis", ...] = ()
    name: str = ""
    source: str = ""  # what was read, in words
    dataset: str | None = None
    planned_steps: int | None = None
    unit: str = "steps"  # what the step counter counts
    inferences: tuple[str, ...] = ()  # what was not told but concluded, and from what
    notes: tuple[str, ...] = ()  # what a reader should know about how the file was read
    marks: tuple[tuple[int, str], ...] = field(default=(), repr=False)  # steps worth marking in a picture

    @property
    def since(self) -> str:
        """From where on the verdict holds, in words: a restart comes after a step, all else holds from one."""
        if self.since_step is None:
            return ""
        return f"{'after' if self.primary == 'restarted' else 'since'} step {self.since_step:,}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; `runs` only where there are several."""
        plain = asdict(self)
        plain["marks"] = [{"step": step, "what": what} for step, what in self.marks]
        plain["runs"] = [run.as_json() for run in self.runs]
        if not self.runs:
            del plain["runs"]
        return plain
