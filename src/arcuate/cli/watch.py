"""Terminal display of a training run."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.progress import Progress as Bar
from rich.text import Text

from arcuate.cli.console import bar, counted, err, percent, say
from arcuate.data.alphabet import SILENCE_NAME
from arcuate.evaluation.metrics import DELETED, INSERTED, align
from arcuate.training.callbacks import Callback

_SAMPLE_WIDTH = 100


class TrainingDisplay(Callback):
    """Callback with a progress bar and a line per validation, incident and stage (without a terminal, per log row).

    Each validation shows one decoded trial under its reference.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._loss = ""
        self._sample: tuple[Text, ...] = ()  # printed below the next validation row

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._loss = ""

    def report(self, done: int, total: int, description: str) -> None:
        """Progress function: one bar after another, each until it is complete."""
        if self._bar is None:
            self._bar = bar()
            self._bar.add_task(description, total=total)
            self._bar.start()
        self._bar.update(self._bar.tasks[0].id, completed=done, total=total, description=description + self._loss)
        if done >= total:
            self.close()

    def close(self) -> None:
        """Stop the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_metrics(self, row: dict[str, Any]) -> None:
        loss = "–" if row.get("loss") is None else f"{row['loss']:.3f}"
        if row["split"] != "train":
            say(f"step {row['step']:>6}  {row['split']} PER {percent(row['per'])}  loss {loss}")
            for line in self._sample:
                err.print(line, no_wrap=True, overflow="ellipsis", crop=True)
            self._sample = ()
            return
        self._loss = f", loss {loss}"
        if not err.is_terminal:
            norm = "–" if row["grad_norm"] is None else f"{row['grad_norm']:.2f}"
            say(f"step {row['step']:>6}  loss {loss}  grad norm {norm}  lr {row['lr']:.2e}")

    def on_incident(self, row: dict[str, Any]) -> None:
        after = ""
        if "rewound_to" in row:
            after = f" to step {row['rewound_to']}, learning rate now × {row['lr_scale']:.2g}"
        say(f"step {row['step']:>6}  {row['action']}{after}: {row['reason']}")

    def on_stage_end(self, row: dict[str, Any]) -> None:
        """Announce the next stage, because its losses have a different scale."""
        n, best = row["without_improvement"], row["best_per"]
        why = f", {counted(n, 'validation')} without improvement" if n else ""
        best = "" if best is None else f", best PER {percent(best)}"
        following = "" if row["next"] is None else f"; next stage: {row['next']}"
        say(f"step {row['step']:>6}  stage {row['stage']} complete{why}{best}{following}")

    def on_sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        self._sample = align_lines(reference, hypothesis)


def align_lines(reference: Sequence[str], hypothesis: Sequence[str]) -> tuple[Text, Text]:
    """Reference above hypothesis, phoneme by phoneme; errors are in brackets, and red if the terminal has colour."""
    above, below = Text("  reference   ", style="dim"), Text("  hypothesis  ", style="dim")
    for expected, decoded in align(reference, hypothesis):
        wrong = expected != decoded
        top = "" if expected == INSERTED else _short(expected)
        bottom = "-" if decoded == DELETED else _short(decoded)
        bottom = f"[{bottom}]" if wrong else f" {bottom} "
        width = max(len(top) + 2, len(bottom))
        above.append(f" {top} ".ljust(width), style="default")
        below.append(bottom.ljust(width), style="bold red" if wrong else "default")
    for line in (above, below):
        line.rstrip()
        line.truncate(_SAMPLE_WIDTH, overflow="ellipsis")
    return above, below


def _short(phoneme: str) -> str:
    return "|" if phoneme == SILENCE_NAME else phoneme
