"""TensorBoard: event files in RUN/tensorboard."""

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from arcuate.config import to_yaml
from arcuate.run import Run
from arcuate.training.config import TrainingConfig


class EventFiles:
    """Every opening starts a new file, which tells TensorBoard to forget what older ones say of later steps."""

    def __init__(self, run: Run, recipe: TrainingConfig, step: int) -> None:
        self.folder = run.path / "tensorboard"
        self.writer = self.start(step)
        self.writer.add_text("recipe", as_block(to_yaml(recipe)), step)

    def start(self, step: int) -> SummaryWriter:
        return SummaryWriter(str(self.folder), purge_step=step + 1)

    def send(self, step: int, values: Mapping[str, float], text: str | None) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        if text is not None:
            self.writer.add_text("val/sample", as_block(text), step)
        self.writer.flush()  # a run that is killed has nothing in the air

    def rewound(self, step: int) -> None:
        self.writer.close()
        self.writer = self.start(step)

    def close(self, failed: bool) -> None:
        self.writer.close()


def as_block(text: str) -> str:
    """Indented, which TensorBoard shows as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
