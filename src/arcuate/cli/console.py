"""Terminal output: messages and progress on stderr, results on stdout, JSON on one line, and training runs."""

import logging
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from arcuate.errors import escape_controls
from arcuate.files import to_json_line
from arcuate.progress import ProgressBar, counted, logger, percent
from arcuate.training.callbacks import Callback

Given = Mapping[str, Any]  # arguments of a command
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


# --- training runs ------------------------------------------------------------------------------------------


class TrainingDisplay(Callback):
    """Callback with a progress bar and a line per validation, incident and stage; without a terminal, also per log row.

    Each validation shows one decoded trial under its reference.
    """

    def __init__(self) -> None:
        self._bar = ProgressBar(console=err, always=True)
        self._loss = ""
        self._rate_name = "PER"
        self._sample: tuple[Text, ...] = ()  # printed below the next validation row

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the progress bar."""
        self._bar.close()
        self._loss = ""

    def report(self, done: int, total: int, description: str) -> None:
        """Update the progress bar."""
        self._bar(done, total, description + (self._loss if err.is_terminal else ""))

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
