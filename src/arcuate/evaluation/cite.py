"""References to cite for a run: the software, the data set, and the papers of the methods that its recipe uses."""

from dataclasses import dataclass
from pathlib import Path

from arcuate.data.releases import RELEASES
from arcuate.run import Run, RunLike, open_run
from arcuate.training.config import read_config

_SOFTWARE = (
    "The Arcuate developers. Arcuate: intracortical recordings of attempted speech to text, version {version}."
    " https://github.com/arcuate-bci/arcuate"
)
_METHODS = {
    "ctc": "Graves A, Fernández S, Gomez F, Schmidhuber J. Connectionist temporal classification. ICML (2006).",
    "rnnt": "Graves A. Sequence transduction with recurrent neural networks. arXiv:1211.3711 (2012).",
    "gru": "Cho K, van Merriënboer B, Gulcehre C, et al. Learning phrase representations using RNN encoder–decoder."
    " EMNLP (2014).",
    "ssm": "Dao T, Gu A. Transformers are SSMs: generalized models and efficient algorithms through structured"
    " state space duality. ICML (2024).",
    "transformer": "Vaswani A, Shazeer N, Parmar N, et al. Attention is all you need. NeurIPS (2017).",
    "intermediate": "Lee J, Watanabe S. Intermediate loss regularization for CTC-based speech recognition."
    " ICASSP (2021).",
    "masks": "Park DS, Chan W, Zhang Y, et al. SpecAugment. Interspeech (2019).",
}  # fmt: skip


@dataclass(frozen=True)
class Citation:
    """One reference and why it applies."""

    reason: str
    reference: str


@dataclass(frozen=True)
class Citations:
    """References of a run."""

    run: str
    references: tuple[Citation, ...]
    note: str = ""


def cite(run: RunLike) -> Citations:
    """References to cite when results of a run are published."""
    opened = open_run(Path(run))
    data = opened.data()
    version = opened.environment().get("arcuate") or "unknown"  # that trained the run
    references = [Citation("software", _SOFTWARE.format(version=version))]
    layout, simulated = data.get("layout"), bool(data.get("simulated"))
    note = ""
    if simulated:
        note = "the run was trained on simulated data, so there is no data set to cite"
    elif layout in RELEASES:
        references.append(Citation("data", RELEASES[str(layout)].reference))
    else:
        note = f"no reference is known for data of layout {layout}; cite the data set that you prepared"
    return Citations(opened.name, (*references, *_method_references(opened)), note)


def _method_references(run: Run) -> list[Citation]:
    recipe = read_config(run)
    used = ["ctc"] if recipe.loss.ctc.weight > 0 else []
    used += ["rnnt"] if recipe.transducer.enabled and recipe.loss.rnnt.weight > 0 else []
    used += [recipe.encoder.kind] if recipe.encoder.kind in _METHODS else []
    used += ["intermediate"] if recipe.loss.intermediate.layers else []
    used += ["masks"] if recipe.augment.time_masks.n_masks or recipe.augment.feature_masks.n_masks else []
    return [Citation(name, _METHODS[name]) for name in used]
