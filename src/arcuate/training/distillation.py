"""Distillation (Hinton et al. 2015): the frame posteriors of a trained model are training targets for another model.

The teacher may be bidirectional or wider; it only has to share the alphabet, the sessions, the normalisation and the
patches of the student, so that their frames correspond.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from arcuate.errors import UserError
from arcuate.losses.config import DistillationSettings
from arcuate.models.config import ModelConfig
from arcuate.models.interfaces import ModelInputs
from arcuate.models.io import WEIGHTS_FILE, checksum, load_model
from arcuate.models.model import Model
from arcuate.run import absolute_parent, find_checkpoint, split_parent


@dataclass(frozen=True, eq=False)
class Teacher:
    """A trained model whose weights do not change."""

    model: Model
    sessions: Tensor  # (n,) index in the teacher of each session of the student
    path: str
    checksum: str  # of its weights

    def log_probs(self, bins: Tensor, n_bins: Tensor, session: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """CTC log-probabilities of normalised bins without augmentation. (B, F, V)"""
        with torch.no_grad():
            # The front end sets padding to 0 in place, and the caller still uses the bins.
            inputs = ModelInputs(bins.clone(), n_bins, self.sessions[session], lengths=lengths)
            return self.model.encode(inputs).log_probs["ctc"].float()

    def to_dict(self) -> dict[str, str]:
        return {"path": self.path, "checksum": self.checksum}


def load_teacher(settings: DistillationSettings, student: ModelConfig, device: torch.device) -> Teacher | None:
    """The teacher of a recipe, checked against the student; None if there is none."""
    if settings.teacher is None or settings.weight == 0:
        return None
    folder = find_checkpoint(*split_parent(settings.teacher))
    model = load_model(folder)
    own, other = student.settings.front_end, model.config.settings.front_end
    facts = {
        "channels": (student.n_channels, model.config.n_channels),
        "classes": (student.classes, model.config.classes),
        **{f"front_end.{key}": (getattr(own, key), getattr(other, key)) for key in ("normalise", "log1p", "patch")},
    }
    if own.normalise == "rolling":
        facts["front_end.rolling_bins"] = (own.rolling_bins, other.rolling_bins)
    if differing := [name for name, (mine, theirs) in facts.items() if mine != theirs]:
        raise UserError(
            f"the teacher {settings.teacher} and this recipe differ in {differing[0]}; train a teacher with the same"
            f" {differing[0]}"
        )
    if missing := [s for s in student.sessions if s not in model.config.sessions]:
        raise UserError(f"the teacher {settings.teacher} has no session {missing[0]}; train it on all sessions")
    indices = torch.tensor([model.config.sessions.index(s) for s in student.sessions])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return Teacher(model.to(device), indices, absolute_parent(settings.teacher), checksum(folder / WEIGHTS_FILE))
