"""`arcuate bench`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import (
    Adapt,
    Beam,
    Head,
    Json,
    LexiconFile,
    LmFile,
    ModelPath,
    NoWords,
    ReplayedStore,
    SessionName,
    WeightsFile,
    app,
)
from arcuate.cli.console import emit_json, out, percent, print_table, progress

_bench_app = typer.Typer(
    help="Benchmarks: latency on this machine, and robustness to corrupted input.", no_args_is_help=True
)
app.add_typer(_bench_app, name="bench")


@_bench_app.command("live")
def bench_live(
    run: ModelPath,
    seconds: Annotated[float, typer.Option(min=1.0, max=86_400.0, help="Length of the replayed recording.")] = 60.0,
    fast: Annotated[bool, typer.Option("--fast", help="Replay as fast as possible, not in real time.")] = False,
    lm: LmFile = "default",
    lexicon: LexiconFile = "default",
    no_words: NoWords = False,
    config: WeightsFile = None,
    beam: Beam = None,
    head: Head = None,
    data: ReplayedStore = None,
    split: Annotated[str, typer.Option(help="Split to replay: val, test, train or all.")] = "val",
    session: SessionName = None,
    adapt: Adapt = False,
    as_json: Json = False,
) -> None:
    """Measure the delay from the last bin of each frame to its text, in a real-time replay on one thread."""
    from arcuate.decoding.options import DecoderOptions
    from arcuate.live.bench import bench_live
    from arcuate.models.layout import check_head

    with progress("loading the model, the lexicon and the language model") as report:
        result = bench_live(
            run,
            seconds=seconds,
            real_time=not fast,
            options=DecoderOptions(
                lm="none" if no_words else str(lm),
                lexicon=str(lexicon),
                config=config,
                beam=beam,
                head=check_head(head),
                data=data,
                session=session,
                adapt=adapt,
            ),
            split=split,
            progress=report,
        )
    emit_json(result.to_dict()) if as_json else out.print(result.summary(), soft_wrap=True)


@_bench_app.command("robustness")
def robustness(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    split: Annotated[str, typer.Option(help="val, test, dev or train.")] = "val",
    data: Annotated[Path | None, typer.Option(help="Store; default: the store of the training run.")] = None,
    trials: Annotated[int, typer.Option(min=0, help="Maximum number of trials; 0 = all.")] = 100,
    as_json: Json = False,
) -> None:
    """Measure the error rate on corrupted input: dead or permuted channels, drift, lost packets, noise."""
    from arcuate.data.alphabet import error_rate_name
    from arcuate.evaluation.robustness import bench_robustness

    with progress("loading") as report:
        result = bench_robustness(
            run,
            split=split,
            data=data,
            n_trials=trials or None,
            progress=report,
        )
    if as_json:
        emit_json(result.to_dict())
        return
    names = list(result.mce)
    rows = [(e.name, *(percent(e.mean(name)) for name in names)) for e in result.corruptions]
    heading = f"{error_rate_name(result.classes)}, mean of severities"
    print_table((heading, *names), rows, title=f"Robustness ({split})", right=names)
    out.print(result.summary(), soft_wrap=True)


@_bench_app.command("floor")
def floor(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    split: Annotated[str, typer.Option(help="val, test, dev or train.")] = "val",
    data: Annotated[Path | None, typer.Option(help="Store; default: the store of the training run.")] = None,
    as_json: Json = False,
) -> None:
    """Train the recipe of a run on input without neural information, and score it: a lower bound for error rates."""
    from arcuate.experiments.floor import measure_floor

    with progress("training without neural information") as report:
        result = measure_floor(run, split=split, data=data, progress=report)
    emit_json(result.to_dict()) if as_json else out.print(result.summary(), soft_wrap=True)
