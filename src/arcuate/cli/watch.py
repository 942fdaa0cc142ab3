"""What a person sees of training."""

from types import TracebackType
from typing import Any

from arcuate.cli.console import bar, err, percent, say


class SilentWatcher:
    """For the processes that do not write."""

    def __enter__(self) -> "SilentWatcher":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, step: int) -> None:
        pass

    def row(self, row: dict[str, Any]) -> None:
        pass

    def incident(self, row: dict[str, Any]) -> None:
        pass


class TerminalWatcher:
    """A progress bar with time left, a line per validation and per incident (without a terminal, per log row)."""

    def __init__(self, n_steps: int) -> None:
        self.bar = bar()
        self.task = self.bar.add_task("training", total=n_steps)

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
