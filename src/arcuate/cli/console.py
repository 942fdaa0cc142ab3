"""Terminal output: messages and progress on stderr, results on stdout, JSON on one line, and training runs."""

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from arcuate.errors import escape_controls
from arcuate.files import to_json_line
from arcuate.progress import Progress, counted, logger, percent
from arcuate.training.callbacks import Callback

_SAMPLE_WIDTH = 100


class _Console(Console):
    """Output that may quote files: control characters are escaped, because a terminal would interpret them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            plain = segment.control is not None or segment.text.isprintable()
            yield segment if plain else Segment(escape_controls(segment.text), segment.style)


class _MessageConsole(_Console):
    """Messages are optional: if stderr is closed, the command continues without them."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class _ResultConsole(_Console):
    """Results are required: a closed stdout ends the command."""

    def on_broken_pipe(self) -> None:
        exit_broken_pipe()


err = _MessageConsole(stderr=True, highlight=False)
out = _ResultConsole(highlight=False)


def say(message: str) -> None:
    """Print a message on stderr."""
    err.print(message, markup=False, soft_wrap=True)


class _MessageHandler(logging.Handler):
    """Prints log messages of the library; warnings and errors with a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = {logging.WARNING: "warning: ", logging.ERROR: "error: "}.get(record.levelno, "")
        say(prefix + record.getMessage())


def show_log_messages() -> None:
    """Print log messages of the library on stderr."""
    if not any(isinstance(handler, _MessageHandler) for handler in logger.handlers):
        logger.addHandler(_MessageHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False


def emit_json(value: Any) -> None:
    """Print one JSON object on one line on stdout; NaN and infinity become null."""
    try:
        sys.stdout.write(to_json_line(value) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        exit_broken_pipe()


def exit_broken_pipe() -> NoReturn:
    """Exit with 128 + SIGPIPE, as the shell reports a broken pipe, and without an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    right: Collection[str] = (),
    fold: bool = False,
) -> None:
    """Print a table; `right` names the right-aligned columns, and `fold` wraps long cells."""
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for heading in headings:
        justify, overflow = "right" if heading in right else "left", "fold" if fold else "ellipsis"
        table.add_column(heading, justify=justify, overflow=overflow)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(Text, row))
    out.print(table)


class TimeLeft(TimeRemainingColumn):
    """Remaining time; empty while the total is unknown."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else Text("left ") + super().render(task)


def bar() -> Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeLeft())
    return Bar(*columns, console=err)


class PlainProgress:
    """Progress as lines of text if the output is not a terminal: at most one line every `every_s` seconds.

    A short activity prints nothing or, with `always`, one line when it is complete. All other lines include the
    remaining time.
    """

    def __init__(
        self, every_s: float = 30.0, always: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every_s, self._always, self._clock = every_s, always, clock
        self._activity = ""
        self._started = self._printed = 0.0  # time of the last line
        self._first = 0  # items done at the first report

    def __call__(self, done: int, total: int, activity: str) -> None:
        now = self._clock()
        name = activity.split(",")[0]  # without the numbers that follow it
        if name != self._activity:
            self._activity, self._started, self._printed, self._first = name, now, now, done
        is_complete = done >= total and (self._always or self._printed > self._started)  # the second: after other lines
        if now - self._printed < self._every_s and not is_complete:
            return
        self._printed = now
        elapsed, n = now - self._started, done - self._first
        left = f", {_duration(elapsed * (total - done) / n)} left" if n > 0 and done < total else ""
        say(f"{activity} {done}/{total}, {_duration(elapsed)}{left}")


def _duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def progress(description: str) -> Iterator[Progress]:
    """A progress bar with the remaining time; it appears with the first report, so early errors show no bar.

    Without a terminal, progress is printed as lines of text.
    """
    if not err.is_terminal:
        plain = PlainProgress()
        yield lambda done, total, activity: plain(done, total, activity or description)
        return
    with ExitStack() as stack:
        shown = bar()
        task = shown.add_task(description, total=None)

        def report(done: int, total: int, activity: str) -> None:
            if not shown.live.is_started:
                stack.enter_context(shown)
            shown.update(task, completed=done, total=total, description=activity or description)

        yield report


# --- training runs ------------------------------------------------------------------------------------------


class TrainingDisplay(Callback):
    """Callback with a progress bar and a line per validation, incident and stage; without a terminal, also per log row.

    Each validation shows one decoded trial under its reference.
    """

    def __init__(self) -> None:
        self._plain = None if err.is_terminal else PlainProgress(always=True)
        self._bar: Bar | None = None
        self._loss = ""
        self._rate_name = "PER"
        self._sample: tuple[Text, ...] = ()  # printed below the next validation row

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._loss = ""

    def report(self, done: int, total: int, description: str) -> None:
        """Update the progress bar; each activity has its own bar, which closes when it is complete."""
        if self._plain is not None:
            self._plain(done, total, description)
            return
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

    def on_start(self, classes: Sequence[str]) -> None:
        from arcuate.data.alphabet import error_rate_name

        self._rate_name = error_rate_name(classes)

    def on_metrics(self, row: dict[str, Any]) -> None:
        loss = "–" if row.get("loss") is None else f"{row['loss']:.3f}"
        if row["split"] != "train":
            wer = "" if row.get("wer") is None else f"  WER {percent(row['wer'])}"
            say(f"step {row['step']:>6}  {row['split']} {self._rate_name} {percent(row['per'])}{wer}  loss {loss}")
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
            eps = f", eps {row['eps']:.2g}" if "eps" in row else ""
            after = f" to step {row['rewound_to']}, learning rate now × {row['lr_scale']:.2g}{eps}"
        say(f"step {row['step']:>6}  {row['action']}{after}: {row['reason']}")

    def on_stage_end(self, row: dict[str, Any]) -> None:
        """Announce the next stage, because its losses have a different scale."""
        n, best = row["without_improvement"], row["best_per"]
        why = f", {counted(n, 'validation')} without improvement" if n else ""
        best = "" if best is None else f", best {self._rate_name} {percent(best)}"
        following = "" if row["next"] is None else f"; next stage: {row['next']}"
        say(f"step {row['step']:>6}  stage {row['stage']} complete{why}{best}{following}")

    def on_sample(self, reference: Sequence[str], hypothesis: Sequence[str]) -> None:
        self._sample = align_lines(reference, hypothesis)


def align_lines(reference: Sequence[str], hypothesis: Sequence[str]) -> tuple[Text, Text]:
    """Reference above hypothesis, phoneme by phoneme; errors are in brackets, and red if the terminal has colour."""
    from arcuate.data.alphabet import SILENCE_NAME
    from arcuate.evaluation.metrics import DELETED, INSERTED, align

    short = lambda phoneme: "|" if phoneme == SILENCE_NAME else phoneme
    above, below = Text("  reference   ", style="dim"), Text("  hypothesis  ", style="dim")
    for expected, decoded in align(reference, hypothesis):
        wrong = expected != decoded
        top = "" if expected == INSERTED else short(expected)
        bottom = "-" if decoded == DELETED else short(decoded)
        bottom = f"[{bottom}]" if wrong else f" {bottom} "
        width = max(len(top) + 2, len(bottom))
        above.append(f" {top} ".ljust(width), style="default")
        below.append(bottom.ljust(width), style="bold red" if wrong else "default")
    for line in (above, below):
        line.rstrip()
        line.truncate(_SAMPLE_WIDTH, overflow="ellipsis")
    return above, below
