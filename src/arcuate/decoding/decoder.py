"""Offline decoder for scripts and notebooks: `decoder = arcuate.load(RUN)`, then `decoder.decode(bins, session)`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from arcuate.data.batching import BatchStatistics
from arcuate.data.statistics import Statistics
from arcuate.data.trial import Trial
from arcuate.decoding.hypothesis import Hypothesis, greedy
from arcuate.errors import UserError
from arcuate.hub import local_path
from arcuate.models.config import RuntimeSettings
from arcuate.models.interfaces import Outputs
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.models.runtime import choose_device, configure_cuda
from arcuate.run import find_checkpoint


def load(path: str | Path, checkpoint: str = "best", device: str = "cpu") -> "Decoder":
    """Load the model of a run (its best checkpoint by default), of an imported model folder, or of hf:ORG/NAME."""
    target = choose_device(device, "device")
    configure_cuda(RuntimeSettings(), target)
    model = load_model(find_checkpoint(local_path(path), checkpoint)).to(target)
    return Decoder(model.eval())


@dataclass(frozen=True)
class Decoder:
    """A trained model that decodes complete trials, one at a time."""

    model: Model

    def __repr__(self) -> str:
        n_parameters = sum(p.numel() for p in self.model.parameters())
        return f"Decoder({n_parameters:,} parameters, {len(self.sessions)} sessions, {len(self.classes)} classes)"

    @property
    def sessions(self) -> tuple[str, ...]:
        return self.model.config.sessions

    @property
    def classes(self) -> tuple[str, ...]:
        return self.model.config.classes

    def decode(
        self, bins: np.ndarray | Trial, session: str | None = None, statistics: Statistics | None = None
    ) -> Hypothesis:
        """Greedy CTC decoding into phonemes. Arguments as for `outputs`."""
        log_probs = self.log_probs(bins, session, statistics)
        return Hypothesis(tuple(greedy(log_probs)), {"acoustic": float(log_probs.max(axis=1).sum())})

    def log_probs(
        self, bins: np.ndarray | Trial, session: str | None = None, statistics: Statistics | None = None
    ) -> np.ndarray:
        """Natural-log probabilities of all classes at every frame (F, V). Arguments as for `outputs`."""
        outputs = self.outputs(bins, session, statistics)
        return outputs.log_probs["ctc"][0, : int(outputs.n_frames[0])].float().cpu().numpy()

    def outputs(
        self, bins: np.ndarray | Trial, session: str | None = None, statistics: Statistics | None = None
    ) -> Outputs:
        """All model outputs of one trial, as a batch of one: frames, log-probabilities, speaking mode.

        `bins` is (T, C), as stored. A model that normalises by block or by preceding trials needs the block's
        `statistics`: `store.block_statistics(info)` or `store.past_statistics(info)`.
        """
        if isinstance(bins, Trial):
            session = session or bins.session
            bins = bins.bins
        values = torch.from_numpy(np.array(bins, dtype=np.float32))  # a copy: the model may write into it
        self._check(values, session, statistics)
        device = next(self.model.parameters()).device
        index = 0 if session is None else self.sessions.index(session)
        with torch.inference_mode():
            outputs: Outputs = self.model(
                values[None].to(device),
                torch.tensor([len(values)], device=device),
                torch.tensor([index], device=device),
                batch_statistics(statistics, device),
            )
        return outputs

    def _check(self, bins: torch.Tensor, session: str | None, statistics: Statistics | None) -> None:
        n_channels = self.model.config.n_channels
        if bins.ndim != 2 or bins.shape[1] != n_channels or not len(bins):
            raise UserError(f"bins must have shape (T, {n_channels}) with T >= 1, not {tuple(bins.shape)}")
        if not bool(torch.isfinite(bins).all()):
            raise UserError("bins contain NaN or infinite values; replace them (e.g. by 0)")
        front_end = self.model.config.settings.front_end
        if session not in self.sessions and (session is not None or front_end.session_layer.enabled):
            raise UserError(f"session {session!r} is unknown to this model; choose one of {', '.join(self.sessions)}")
        if front_end.normalise != "none" and statistics is None:
            raise UserError(
                f"this model normalises by {front_end.normalise}: pass statistics="
                f"store.{'block' if front_end.normalise == 'block' else 'past'}_statistics(info"
                f"{', log=True' if front_end.log1p else ''})"
            )


def batch_statistics(statistics: Statistics | None, device: torch.device) -> BatchStatistics | None:
    """Statistics of one trial as a batch of one."""
    if statistics is None:
        return None
    return BatchStatistics(
        torch.from_numpy(np.array(statistics.mean, dtype=np.float32))[None].to(device),
        torch.from_numpy(np.array(statistics.sd, dtype=np.float32))[None].to(device),
        torch.tensor([statistics.n_bins], device=device),
    )
