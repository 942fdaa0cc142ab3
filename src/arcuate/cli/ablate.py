"""`arcuate ablate`: train the arms, then say which factor caused the difference."""

from pathlib import Path

from arcuate.ablate.experiment import Experiment, open_experiment, overview, work
from arcuate.ablate.factors import check_factors, read_factors
from arcuate.cli.console import progress, say
from arcuate.run import Run
from arcuate.training.signals import listening


def ablate_command(
    recipe: str,
    arguments: list[str],
    data: Path,
    out: Path,
    n_seeds: int,
    split: str,
    checkpoint: str,
    dry_run: bool,
    as_json: bool,
) -> int:
    factors, overrides = read_factors(arguments)
    check_factors(recipe, overrides, factors)
    experiment = Experiment(recipe, overrides, factors, data, out, n_seeds, split, checkpoint)
    open_experiment(experiment)

    def score(run: Run) -> None:
        from arcuate.cli.evaluate import evaluate_run

        evaluate_run(run, split, data, checkpoint, experiment.label, None)

    with listening() as stop, progress("training") as report:
        failed = work(experiment, score, stop, say, report)
    say(str(failed))
    say(str(overview(experiment)))
    return stop.exit_code
