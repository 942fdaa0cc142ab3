"""`arcuate evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import SPLITS, Json, app, complete_from
from arcuate.cli.console import emit_json, out, percent, print_table, progress, say

if TYPE_CHECKING:
    from arcuate.evaluation.evaluate import Evaluation


@app.command()
def evaluate(
    run: Annotated[
        Path, typer.Argument(help="RUN or RUN@CHECKPOINT, model folder written by `arcuate import`, or hf:ORG/NAME.")
    ],
    split: Annotated[str, typer.Option(help="val, test, dev or train.", autocompletion=complete_from(*SPLITS))] = "val",
    data: Annotated[
        Path | None, typer.Option(help="Store to evaluate on; default: the store of the training run.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Label of the results file results/<split>.<label>.jsonl.")] = None,
    scores: Annotated[
        Path | None,
        typer.Option("--scores", "--save-logits", help="Also write all frame log-probabilities to this .npz file."),
    ] = None,
    beam: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Width of the search, 1 = greedy; default: as in the recipe.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="ctc, transducer or both; default: both if the transducer was trained.")
    ] = None,
    adapt: Annotated[
        bool,
        typer.Option("--adapt", help="Adapt the session layer online, without labels, to known and new sessions."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Evaluate a run on a split: PER with confidence interval, by session and block, one line per trial."""
    from arcuate.evaluation.evaluate import evaluate as evaluate_run

    with progress("checking trials") as report:
        evaluation = evaluate_run(
            run,
            split=split,
            data=data,
            head=head,
            beam=beam,
            label=label,
            scores=scores,
            adapt=adapt,
            progress=report,
        )
    emit_json(evaluation.to_dict()) if as_json else print_evaluation(evaluation)


def print_evaluation(evaluation: "Evaluation") -> None:
    """Print the error rate by session and in total."""
    from arcuate.data.alphabet import error_rate_name

    metrics, split = evaluation.metrics, evaluation.provenance.split
    name = error_rate_name(evaluation.classes)
    if evaluation.adaptation is not None:
        _print_adapted_sessions(evaluation, f"{name} by session ({split})")
    elif rows := [(session, percent(rate)) for session, rate in metrics.per_by_session.items()]:
        print_table(("session", name), rows, title=f"{name} by session ({split})", right=(name,))
    if metrics.per_by_mode:
        accuracy = metrics.mode_accuracy
        correct = "" if accuracy is None else f"; mode predicted correctly in {percent(accuracy)} of trials"
        out.print(", ".join(f"{mode} {percent(rate)}" for mode, rate in metrics.per_by_mode.items()) + correct)
    out.print(evaluation.summary(), soft_wrap=True)
    say(f"one line per trial in {evaluation.results_file}")


def _print_adapted_sessions(evaluation: "Evaluation", title: str) -> None:
    assert evaluation.adaptation is not None
    sessions = evaluation.adaptation.sessions
    names, numbers = ("session", "initial layer"), ("trials", "unadapted", "adapted", "steps", "fall-backs")
    rows = [
        (
            *(row.session, "its own" if row.known else row.init_session, str(row.n_trials)),
            *(percent(row.per_unadapted), percent(row.per), str(row.n_steps), str(row.n_fallbacks)),
        )
        for row in sessions
    ]
    print_table((*names, *numbers), rows, title=title, right=numbers)
    if new := [row.session for row in sessions if not row.known]:
        say(
            "with a few cued sentences, calibration lowers the error rate further:"
            f" arcuate calibrate RUN --session {new[-1]} --sentences 20"
        )
