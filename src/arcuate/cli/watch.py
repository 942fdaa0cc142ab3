"""What a person sees of training."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.text import Text

from arcuate.cli.console import bar, counted, err, percent, say
from arcuate.data.alphabet import SILENCE_NAME
from arcuate.evaluation.metrics import DELETED, INSERTED, aligned

SAMPLE_WIDTH = 100


class TerminalWatcher:
    """A progress bar with time left, a line per validation and per incident (without a terminal, per log row).

    With a validation comes one trial as it was said and as it was read.
    """

    def __init__(self, n_steps: int) -> None:
        self.bar = bar()
        self.task = self.bar.add_task("training", total=n_steps)
        self.lines: tuple[Text, ...] = ()  # of the sample that the next validation row belongs to

    def __enter__(self) -> "TerminalWatcher":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        loss = "–" if row.get("loss") is None else f"{row['loss']:.3f}"
        if row["split"] != "train":
            say(f"step {row['step']:>6}  {row['split']} PER {percent(row['per'])}  loss {loss}")
            for line in self.lines:
                err.print(line, no_wrap=True, overflow="ellipsis", crop=True)
            self.lines = ()
            return
        self.bar.update(self.task, description=f"training, loss {loss}")
        if not err.is_terminal:
            norm = "–" if row["grad_norm"] is None else f"{row['grad_norm']:.2f}"
            say(f"step {row['step']:>6}  loss {loss}  grad norm {norm}  lr {row['lr']:.2e}")

    def incident(self, row: dict[str, Any]) -> None:
        after = (
            f" to step {row['rewound_to']}, rates now × {row['rate_scale']:.2g}"
            if "rewound_to" in row
            else ""
        )
        say(f"step {row['step']:>6}  {row['action']}{after}: {row['reason']}")

    def stage(self, row: dict[str, Any]) -> None:
        """A stage is over: losses of the next one are of another size, and a reader should know why."""
        self.bar.update(self.task, total=row["ends_at"])
        n, best = row["without_gain"], row["best_per"]
        why = f", {counted(n, 'validation')} without a gain" if n else ""
        best = "" if best is None else f", best PER {percent(best)}"
        after = "" if row["next"] is None else f"; next: {row['next']}"
        say(f"step {row['step']:>6}  stage {row['stage']} is over{why}{best}{after}")

    def sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        self.lines = compare(reference, hypothesis)


def compare(reference: Sequence[str], hypothesis: Sequence[str]) -> tuple[Text, Text]:
    """Two lines, phoneme under phoneme; what was read wrongly stands in brackets, and in red where there is colour."""
    said, read = Text("  said  ", style="dim"), Text("  read  ", style="dim")
    for true, heard in aligned(reference, hypothesis):
        wrong = true != heard
        above = "" if true == INSERTED else short(true)
        below = "-" if heard == DELETED else short(heard)
        below = f"[{below}]" if wrong else f" {below} "
        width = max(len(above) + 2, len(below))
        said.append(f" {above} ".ljust(width), style="default")
        read.append(below.ljust(width), style="bold red" if wrong else "default")
    for line in (said, read):
        line.rstrip()
        line.truncate(SAMPLE_WIDTH, overflow="ellipsis")
    return said, read


def short(phoneme: str) -> str:
    return "|" if phoneme == SILENCE_NAME else phoneme
