"""`arcuate combine`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.console import emit_json, print_table, progress
from arcuate.cli.console import out as console


@app.command()
def combine(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="Several runs, .jsonl or .npz files; or one .jsonl file with several candidates per trial."
        ),
    ],
    method: Annotated[
        str, typer.Option(help="linear, mbr or rover on words; arithmetic or geometric on frame scores; or auto.")
    ] = "auto",
    split: Annotated[str, typer.Option(help="With runs: split whose results are combined.")] = "val",
    label: Annotated[str | None, typer.Option(help="With runs: read results/<split>.<label>.jsonl.")] = None,
    votes: Annotated[str, typer.Option(help="Vote weights of the systems: equal or agreement.")] = "equal",
    scale: Annotated[float, typer.Option(min=0.0, help="Factor applied to scores before the softmax.")] = 1.0,
    lm: Annotated[str | None, typer.Option(help="With --method linear: n-gram model whose score is a feature.")] = None,
    llm: Annotated[
        Path | None, typer.Option(help="With --method linear: causal language model whose score is a feature.")
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Fit the weights of --method linear by cross-validation over folds of trials."),
    ] = False,
    folds: Annotated[int, typer.Option(min=2, max=100, help="Number of folds for --fit.")] = 5,
    weights: Annotated[Path | None, typer.Option(help="File of fitted weights to use.")] = None,
    save_weights: Annotated[
        Path | None, typer.Option(help="Write the weights fitted on all trials to this file.")
    ] = None,
    references: Annotated[Path | None, typer.Option(help="JSON lines with id and text to score against.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the combined texts (.jsonl) or frame scores (.npz).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Combine several decoders, by words or by frame scores."""
    from arcuate.evaluation.combine import FrameCombination
    from arcuate.evaluation.combine import combine as combine_sources

    with progress("combining") as report:
        result = combine_sources(
            *sources,
            method=method,
            split=split,
            label=label,
            votes=votes,
            scale=scale,
            lm=lm,
            llm=llm,
            fit=fit,
            folds=folds,
            weights=weights,
            save_weights=save_weights,
            references=references,
            out=out,
            progress=report,
        )
    if as_json:
        emit_json(result.to_dict())
        return
    if isinstance(result, FrameCombination):
        console.print(result.summary())
        return
    metrics = result.metrics
    words, single = metrics.words, metrics.single
    if words.wer is None or words.cer is None:
        console.print(f"{words.n_trials} trials combined ({result.method}); no references, so no WER")
        return
    rates = {
        "mean of the single systems": single.single_wer_mean if single else None,
        "best single system, chosen on these trials": single.best_single_wer if single else None,
        "best candidates (oracle)": metrics.oracle_wer,
    }
    method = result.method + (", cross-validated" if result.linear and result.linear.cross_fitted else "")
    rates[f"combined ({method}; lm: {words.lm or 'none'})"] = words.wer
    rows = [(title, f"{100 * rate:.2f} %") for title, rate in rates.items() if rate is not None]
    print_table(("", "WER"), rows, right=("WER",))
    low, high = words.wer_low, words.wer_high
    interval = "no interval" if low is None or high is None else f"{100 * low:.2f} to {100 * high:.2f} %"
    console.print(f"95 % interval {interval} on {words.n_scored} trials, CER {100 * words.cer:.2f} %")
    if single and (gap := single.against_best_single):
        console.print(
            f"against the best system {100 * gap.rate:+.2f} points"
            f" ({100 * gap.low:+.2f} to {100 * gap.high:+.2f}), p = {gap.p:.4f}"
        )
