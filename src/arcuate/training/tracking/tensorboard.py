"""TensorBoard: event files in RUN/tensorboard."""

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from arcuate.config import to_yaml
from arcuate.run import Run
from arcuate.training.config import TrainingConfig


class TensorBoardBackend:
    """Each start opens a new file, which makes TensorBoard discard later steps of older files."""

    def __init__(self, run: Run, recipe: TrainingConfig, step: int) -> None:
        self._folder = run.path / "tensorboard"
        self._writer = self._open(step)
        self._writer.add_text("recipe", _code_block(to_yaml(recipe)), step)

    def _open(self, step: int) -> SummaryWriter:
        return SummaryWriter(str(self._folder), purge_step=step + 1)

    def send(self, step: int, values: Mapping[str, float], text: str | None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if text is not None:
            self._writer.add_text("val/sample", _code_block(text), step)
        self._writer.flush()  # nothing is lost if the run is killed

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

    def close(self, failed: bool) -> None:
        self._writer.close()


def _code_block(text: str) -> str:
    """Indent the text, so that TensorBoard shows it verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())
