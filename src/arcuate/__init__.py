"""Arcuate: intracortical recordings of attempted speech to text.

The main commands as functions with typed arguments and typed results; none of them prints. The functions behind `lm`,
`recipes` and the HTML pages are in `arcuate.language.ngram`, `arcuate.experiments` and `arcuate.insight`. Each name is
imported on first use, so that `import arcuate` loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arcuate.adaptation.drift import measure_drift as measure_drift
    from arcuate.adaptation.evaluate import evaluate_adaptation as evaluate_adaptation
    from arcuate.data.prepare import prepare as prepare
    from arcuate.data.simulation import simulate as simulate
    from arcuate.data.store import Store as Store
    from arcuate.decoding.decoder import load as load
    from arcuate.doctor import Remedy as Remedy
    from arcuate.doctor import check_data as check_data
    from arcuate.doctor import diagnose as diagnose
    from arcuate.doctor import try_remedy as try_remedy
    from arcuate.doctor import write_remedy as write_remedy
    from arcuate.errors import UserError as UserError
    from arcuate.evaluation.card import write_card as write_card
    from arcuate.evaluation.combine import combine as combine
    from arcuate.evaluation.decode import decode as decode
    from arcuate.evaluation.evaluate import evaluate as evaluate
    from arcuate.evaluation.rescore import rescore as rescore
    from arcuate.evaluation.submission import submit as submit
    from arcuate.evaluation.tune import tune as tune
    from arcuate.experiments.ablation import ablate as ablate
    from arcuate.experiments.calibrate import calibrate as calibrate
    from arcuate.experiments.export import export as export
    from arcuate.experiments.launch import SlurmSettings as SlurmSettings
    from arcuate.experiments.launch import launch as launch
    from arcuate.experiments.multi_seed import train_seeds as train_seeds
    from arcuate.experiments.push import push as push
    from arcuate.experiments.recipe import Recipe as Recipe
    from arcuate.experiments.recipe import load_recipe as load_recipe
    from arcuate.experiments.sweep import sweep as sweep
    from arcuate.experiments.train import train as train
    from arcuate.insight.ablation import judge_ablation as judge_ablation
    from arcuate.insight.ablation import report_ablation as report_ablation
    from arcuate.insight.board import prepare_board as prepare_board
    from arcuate.insight.charts.curves import plot_curves as plot_curves
    from arcuate.insight.comparison import compare as compare
    from arcuate.insight.ledger import write_ledger as write_ledger
    from arcuate.insight.report import write_report as write_report
    from arcuate.insight.runs import list_runs as list_runs
    from arcuate.live.bench import bench_live as bench_live
    from arcuate.live.decoder import StreamingDecoder as StreamingDecoder
    from arcuate.live.serve import serve as serve
    from arcuate.models.import_checkpoint import import_checkpoint as import_checkpoint
    from arcuate.progress import ProgressBar as ProgressBar
    from arcuate.run import Run as Run

__version__ = "0.1.0"

_HOMES = {
    "ProgressBar": "progress",
    "Recipe": "experiments.recipe",
    "Remedy": "doctor",
    "Run": "run",
    "SlurmSettings": "experiments.launch",
    "Store": "data.store",
    "StreamingDecoder": "live.decoder",
    "UserError": "errors",
    "ablate": "experiments.ablation",
    "bench_live": "live.bench",
    "calibrate": "experiments.calibrate",
    "check_data": "doctor",
    "combine": "evaluation.combine",
    "compare": "insight.comparison",
    "decode": "evaluation.decode",
    "diagnose": "doctor",
    "evaluate": "evaluation.evaluate",
    "evaluate_adaptation": "adaptation.evaluate",
    "export": "experiments.export",
    "import_checkpoint": "models.import_checkpoint",
    "judge_ablation": "insight.ablation",
    "launch": "experiments.launch",
    "list_runs": "insight.runs",
    "load": "decoding.decoder",
    "load_recipe": "experiments.recipe",
    "measure_drift": "adaptation.drift",
    "plot_curves": "insight.charts.curves",
    "prepare": "data.prepare",
    "prepare_board": "insight.board",
    "report_ablation": "insight.ablation",
    "push": "experiments.push",
    "rescore": "evaluation.rescore",
    "serve": "live.serve",
    "simulate": "data.simulation",
    "submit": "evaluation.submission",
    "sweep": "experiments.sweep",
    "train": "experiments.train",
    "train_seeds": "experiments.multi_seed",
    "try_remedy": "doctor",
    "tune": "evaluation.tune",
    "write_card": "evaluation.card",
    "write_ledger": "insight.ledger",
    "write_remedy": "doctor",
    "write_report": "insight.report",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'arcuate' has no attribute {name!r}")
    return getattr(import_module(f"arcuate.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
