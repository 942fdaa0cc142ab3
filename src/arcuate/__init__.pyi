from .data.prepare import prepare as prepare
from .data.simulation import simulate as simulate
from .data.store import Store as Store
from .decoding.decoder import StreamingDecoder as StreamingDecoder
from .decoding.load import load as load
from .doctor import diagnose as diagnose
from .errors import UserError as UserError
from .evaluation.combine import combine as combine
from .evaluation.decode import decode as decode
from .evaluation.evaluate import evaluate as evaluate
from .evaluation.rescore import rescore as rescore
from .evaluation.tune import tune as tune
from .experiments.ablation import ablate as ablate
from .experiments.calibrate import calibrate as calibrate
from .experiments.export import export as export
from .experiments.recipe import Recipe as Recipe
from .experiments.recipe import load_recipe as load_recipe
from .experiments.sweep import sweep as sweep
from .experiments.train import train as train
from .insight.charts.curves import plot_curves as plot_curves
from .insight.compare import compare as compare
from .insight.ledger import write_ledger as write_ledger
from .insight.report import write_report as write_report
from .insight.runs import list_runs as list_runs
from .live.bench import bench_live as bench_live
from .live.serve import serve as serve
from .models.import_checkpoint import import_checkpoint as import_checkpoint
from .progress import ProgressBar as ProgressBar
from .run import Run as Run

__version__: str
__all__: list[str]
