"""`arcuate bench`."""

from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.options import (
    Adapt,
    AdaptSetting,
    Beam,
    Head,
    LexiconFile,
    LmFile,
    ModelPath,
    NoWords,
    ReplayedStore,
    SessionName,
    WeightsFile,
)

if TYPE_CHECKING:
    from arcuate.live.bench import LiveBenchmark

bench_app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


app.add_typer(bench_app, name="bench")


@bench_app.command("live")
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
    adapt: Adapt = None,
    setting: AdaptSetting = None,
    as_json: Json = False,
) -> None:
    """Measure the time from the last bin of each frame to its text, with bins in real time and one thread."""
    from arcuate.cli.console import emit_json, progress
    from arcuate.cli.set_option import read_adaptation
    from arcuate.live.bench import bench_live

    adaptation = read_adaptation(adapt, setting)
    with progress("loading the model, the lexicon and the language model") as report:
        result = bench_live(
            run,
            seconds=seconds,
            real_time=not fast,
            lm=None if no_words else lm,
            lexicon=lexicon,
            decoding=config,
            beam=beam,
            head=head,
            data=data,
            split=split,
            session=session,
            adapt=adaptation,
            progress=report,
        )
    emit_json(result.to_dict()) if as_json else print_benchmark(result)


def print_benchmark(result: "LiveBenchmark") -> None:
    """Print the quantiles of the time per frame."""
    from arcuate.cli.console import out

    summary, status = result.to_dict(), result.adaptation
    stolen = summary["missed_while_stolen"]
    out.print(
        f"per frame of {result.deadline_ms:g} ms: p50 {summary['frame_ms_p50']:.2f} ms,"
        f" p99 {summary['frame_ms_p99']:.2f} ms, max {summary['frame_ms_max']:.2f} ms;"
        f" {summary['missed_deadlines']} of {summary['n_frames']:,} deadlines missed"
        + (f" ({stolen} during steal time of the hypervisor);" if stolen else ";")
        + f" model delay {result.delay_ms:g} ms",
        soft_wrap=True,
    )
    if status is not None:
        out.print(
            f"adaptation of {status.session} ({status.state}): {status.n_steps} updates after {status.n_sentences}"
            f" sentences, {status.n_fallbacks} fall-backs, {status.n_skipped} sentences skipped",
            soft_wrap=True,
        )
