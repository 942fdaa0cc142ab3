"""`arcuate evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arcuate.cli.app import SPLITS, AdaptSetting, Json, app, complete_from, complete_method
from arcuate.cli.console import emit_json, out, percent, print_table, progress, say
from arcuate.errors import UserError

if TYPE_CHECKING:
    from arcuate.adaptation.evaluate import AdaptationResult
    from arcuate.evaluation.evaluate import Evaluation


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder, model folder written by `arcuate import`, or hf:ORG/NAME.")],
    split: Annotated[str, typer.Option(help="val, test, dev or train.", autocompletion=complete_from(*SPLITS))] = "val",
    data: Annotated[
        Path | None, typer.Option(help="Store to evaluate on; default: the store of the training run.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="best, last, step-NNNNNNNN or stage-NAME.", autocompletion=complete_from("best", "last"))
    ] = "best",
    label: Annotated[str | None, typer.Option(help="Label of the results file results/<split>.<label>.jsonl.")] = None,
    scores: Annotated[
        Path | None,
        typer.Option("--scores", "--save-logits", help="Also write all frame log-probabilities to this .npz file."),
    ] = None,
    search: Annotated[str | None, typer.Option(help="greedy or beam; default: as in the recipe.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, max=100_000, help="Width of the beam search.")] = None,
    head: Annotated[
        str, typer.Option(help="ctc, transducer or both; the last two use a beam of 8 by default.")
    ] = "ctc",
    adapt: Annotated[
        str | None,
        typer.Option(
            help="Method of online adaptation to known or new sessions: none, statistics, one-step, replay or entropy.",
            autocompletion=complete_method,
        ),
    ] = None,
    session: Annotated[list[str] | None, typer.Option(help="With --adapt: only these sessions.")] = None,
    setting: AdaptSetting = None,
    confidence: Annotated[
        bool, typer.Option("--confidence", help="Decode to words and measure the calibration of their confidences.")
    ] = False,
    lm: Annotated[
        str | None,
        typer.Option(help="Language model for --confidence or for the pseudo-labels of --adapt: file or `default`."),
    ] = None,
    lexicon: Annotated[str, typer.Option(help="With --lm: lexicon file, or `default`.")] = "default",
    config: Annotated[Path | None, typer.Option(help="With --lm: search weights written by `arcuate tune`.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run on a split: PER with confidence interval, by session and block, one line per trial."""
    options: dict[str, Any] = {
        "split": split,
        "data": data,
        "checkpoint": checkpoint,
        "label": label,
        "search": search,
        "beam": beam,
        "head": head,
        "scores": scores,
    }
    others = adapt is not None or session or setting or label or scores or search or beam or head != "ctc"
    if confidence:
        if others:
            raise UserError("--confidence accepts only --split, --data, --checkpoint, --lm, --lexicon and --config")
        print_confidence(run, split, data, checkpoint, lm or "default", lexicon, config, as_json)
        return
    if adapt is not None:
        from arcuate.adaptation.evaluate import evaluate_adaptation

        words: dict[str, Any] = {"lm": lm, "lexicon": lexicon, "decoding": config}
        with progress("checking trials") as report:
            result = evaluate_adaptation(
                run, adapt, settings=setting, sessions=session or (), **words, **options, progress=report
            )
        emit_json(result.to_dict()) if as_json else print_adaptation(result)
        return
    if session or setting or lm or config or lexicon != "default":
        raise typer.BadParameter(
            "--session and --set require --adapt METHOD; --lm, --lexicon and --config require --adapt or --confidence"
        )
    from arcuate.evaluation.evaluate import evaluate as evaluate_run

    with progress("checking trials") as report:
        evaluation = evaluate_run(run, **options, progress=report)
    emit_json(evaluation.to_dict()) if as_json else print_evaluation(evaluation)


def print_confidence(
    run: Path, split: str, data: Path | None, checkpoint: str, lm: str, lexicon: str, config: Path | None, as_json: bool
) -> None:
    """Decode to words and print the reliability of their confidences."""
    from arcuate.evaluation.decode import decode

    with progress("loading") as report:
        decoded = decode(
            run, split=split, data=data, checkpoint=checkpoint, lm=lm, lexicon=lexicon, config=config, progress=report
        )
    measured = decoded.metrics.confidence
    if measured is None:
        raise UserError(f"none of the {split} trials has decoded words and a reference; confidence needs both")
    if as_json:
        emit_json(decoded.to_dict())
        return
    columns = ("confidence", "words", "mean confidence", "correct")
    rows = [
        (f"{b.low:.1f} to {b.high:.1f}", str(b.n), percent(b.confidence), percent(b.accuracy))
        for b in measured.words.bins
        if b.n
    ]
    print_table(columns, rows, title=f"Reliability of word confidences ({split})", right=columns[1:])
    risk = dict(measured.words.risk_coverage)
    most = ", ".join(f"{percent(risk[c])} of the most confident {100 * c:.0f} %" for c in (0.25, 0.5, 0.75, 1.0))
    out.print(f"incorrect words: {most}", soft_wrap=True)
    out.print(measured.summary(), soft_wrap=True)


def print_evaluation(evaluation: "Evaluation") -> None:
    """Print the error rate by session and in total."""
    from arcuate.data.alphabet import error_rate_name

    metrics, split = evaluation.metrics, evaluation.provenance.split
    rows = [(session, percent(rate)) for session, rate in metrics.per_by_session.items()]
    if rows:
        name = error_rate_name(evaluation.classes)
        print_table(("session", name), rows, title=f"{name} by session ({split})", right=(name,))
    if metrics.per_by_mode:
        accuracy = metrics.mode_accuracy
        correct = "" if accuracy is None else f"; mode predicted correctly in {percent(accuracy)} of trials"
        out.print(", ".join(f"{mode} {percent(rate)}" for mode, rate in metrics.per_by_mode.items()) + correct)
    out.print(evaluation.summary(), soft_wrap=True)
    say(f"one line per trial in {evaluation.results_file}")


def print_adaptation(result: "AdaptationResult") -> None:
    """Print the error rate by session, adapted and unadapted, and in total."""
    from arcuate.data.alphabet import error_rate_name

    names, numbers = ("session", "initial layer"), ("trials", "unadapted", "adapted", "steps", "fall-backs")
    rows = [
        (
            *(row.session, "its own" if row.known else row.init_session, str(row.n_trials)),
            *(percent(row.per_unadapted), percent(row.per), str(row.n_steps), str(row.n_fallbacks)),
        )
        for row in result.sessions
    ]
    if rows:
        title = f"{error_rate_name(result.classes)} by session ({result.provenance.split})"
        print_table((*names, *numbers), rows, title=title, right=numbers)
    out.print(result.summary(), soft_wrap=True)
    say(f"one line per trial in {result.results_file}")
    if new := [row.session for row in result.sessions if not row.known]:
        say(
            "with a few cued sentences, calibration lowers the error rate further:"
            f" arcuate calibrate RUN --session {new[-1]} --sentences 20"
        )
