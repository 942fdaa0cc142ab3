"""`arcuate evaluate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import SPLITS, Json, app, complete_from

if TYPE_CHECKING:
    from arcuate.adaptation.evaluate import AdaptationResult
    from arcuate.evaluation.evaluate import Evaluation
    from arcuate.evaluation.trials import PhonemeMetrics


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Run folder, or model folder written by `arcuate import`.")],
    split: Annotated[str, typer.Option(help="val, test, dev or train.", autocompletion=complete_from(*SPLITS))] = "val",
    data: Annotated[
        Path | None, typer.Option(help="Store to evaluate on; default: the store of the training run.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="best, last, step-NNNNNNNN or stage-NAME.", autocompletion=complete_from("best", "last"))
    ] = "best",
    label: Annotated[str | None, typer.Option(help="Write results/<split>.<label>.jsonl.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Also write all frame scores to this .npz file.")] = None,
    search: Annotated[str | None, typer.Option(help="greedy or beam; default: as in the recipe.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, max=100_000, help="Width of the beam search.")] = None,
    head: Annotated[
        str, typer.Option(help="ctc, transducer or both; the last two use a beam of 8 by default.")
    ] = "ctc",
    adapt: Annotated[
        str | None,
        typer.Option(
            help="Online adaptation, known and new sessions: none, statistics, one-step, replay or entropy.",
            autocompletion=complete_from("none", "statistics", "one-step", "replay", "entropy"),
        ),
    ] = None,
    session: Annotated[list[str] | None, typer.Option(help="With --adapt: only these sessions.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="With --adapt: adaptation setting as key=value, such as lr=5e-4.")
    ] = None,
    lm: Annotated[
        str | None, typer.Option(help="With --adapt: language model for decoding pseudo-labels, or `default`.")
    ] = None,
    lexicon: Annotated[str, typer.Option(help="With --lm: lexicon file, or `default`.")] = "default",
    config: Annotated[Path | None, typer.Option(help="With --lm: search weights written by `arcuate tune`.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a run on a split: PER with confidence interval, by session and block, one line per trial."""
    from arcuate.cli.console import emit_json, progress

    if adapt is not None:
        from arcuate.adaptation.evaluate import evaluate_adaptation
        from arcuate.cli.set_option import read_adaptation

        with progress("checking trials") as report:
            result = evaluate_adaptation(
                run,
                read_adaptation(adapt, setting) or "none",
                split=split,
                data=data,
                checkpoint=checkpoint,
                label=label,
                sessions=session or (),
                lm=lm,
                lexicon=lexicon,
                decoding=config,
                search=search,
                beam=beam,
                head=head,
                scores=scores,
                progress=report,
            )
        emit_json(result.to_dict()) if as_json else print_adaptation(result)
        return
    if session or setting or lm or config or lexicon != "default":
        raise typer.BadParameter("--session, --set, --lm, --lexicon and --config require --adapt METHOD")
    from arcuate.evaluation.evaluate import evaluate as evaluate_run

    with progress("checking trials") as report:
        evaluation = evaluate_run(
            run,
            split=split,
            data=data,
            checkpoint=checkpoint,
            label=label,
            search=search,
            beam=beam,
            head=head,
            scores=scores,
            progress=report,
        )
    emit_json(evaluation.to_dict()) if as_json else print_evaluation(evaluation)


def print_evaluation(evaluation: "Evaluation") -> None:
    """Print PER by session and in total."""
    from arcuate.cli.console import out, percent, say

    metrics = evaluation.metrics
    rows = [(session, percent(rate)) for session, rate in metrics.per_by_session.items()]
    _print_sessions(evaluation.provenance.split, ("session", "PER"), rows)
    if metrics.per_by_mode:
        accuracy = metrics.mode_accuracy
        correct = "" if accuracy is None else f"; mode predicted correctly in {percent(accuracy)} of trials"
        out.print(", ".join(f"{mode} {percent(rate)}" for mode, rate in metrics.per_by_mode.items()) + correct)
    out.print(headline(evaluation), soft_wrap=True)
    say(f"one line per trial in {evaluation.results_file}")


def print_adaptation(result: "AdaptationResult") -> None:
    """Print PER by session, adapted and unadapted, and in total."""
    from arcuate.cli.console import out, percent, say

    rows = [
        (
            row.session,
            "its own" if row.known else row.init_session,
            str(row.n_trials),
            percent(row.per_unadapted),
            percent(row.per),
            str(row.n_steps),
            str(row.n_fallbacks),
        )
        for row in result.sessions
    ]
    columns = ("session", "initial layer", "trials", "unadapted", "adapted", "steps", "fall-backs")
    _print_sessions(result.provenance.split, columns, rows)
    out.print(adaptation_headline(result), soft_wrap=True)
    say(f"one line per trial in {result.results_file}")


def headline(evaluation: "Evaluation") -> str:
    """The result in one sentence."""
    from arcuate.progress import counted, percent

    metrics, split = evaluation.metrics, evaluation.provenance.split
    if metrics.per is None:
        return f"{counted(metrics.n_trials, f'{split} trial')} decoded; PER needs labels"
    caveat = " (the split the checkpoint was selected on)" if evaluation.provenance.selected_on == split else ""
    caveat = " (the training data)" if split == "train" else caveat
    greedy = "" if metrics.per_greedy is None else f" (greedy {percent(metrics.per_greedy)})"
    return (
        f"PER {percent(metrics.per)}{greedy}, {_describe_interval(metrics)}, on"
        f" {counted(metrics.n_scored, split + ' trial')}{caveat}: {metrics.substitutions} substitutions,"
        f" {metrics.insertions} insertions, {metrics.deletions} deletions in {metrics.n_tokens} phonemes"
    )


def adaptation_headline(result: "AdaptationResult") -> str:
    """The result in one sentence."""
    from arcuate.progress import counted, percent

    metrics, method = result.metrics, result.settings.method
    if metrics.per is None:
        return f"{counted(metrics.n_trials, 'trial')} decoded; PER needs labels"
    interval = _describe_interval(metrics)
    if method == "none":
        return f"PER {percent(metrics.per)} unadapted, {interval}"
    p = "" if result.difference is None else f" (p = {result.difference.p:.4f})"
    return (
        f"PER {percent(metrics.per)} with {method}, {interval}; {percent(result.per_unadapted)} unadapted{p};"
        f" {1000 * (result.seconds_per_trial or 0.0):.0f} ms of adaptation per trial, {result.peak_rss_mb:.0f} MB"
    )


def _describe_interval(metrics: "PhonemeMetrics") -> str:
    from arcuate.progress import percent

    low, high = metrics.interval
    if low is None:
        return "no interval from a single trial"
    return f"95 % interval {percent(low)} to {percent(high)}"


def _print_sessions(split: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with one line per session; text columns are left-aligned."""
    from rich.table import Table

    from arcuate.cli.console import out

    if not rows:
        return
    table = Table(box=None, header_style="bold", title=f"PER by session ({split})", title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("session", "initial layer") else "right")
    for row in rows:
        table.add_row(*row)
    out.print(table)
