"""`arcuate bench`."""

from typing import Annotated

import typer

from arcuate.cli.app import (
    Adapt,
    AdaptSetting,
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
from arcuate.cli.console import emit_json, out, progress

_bench_app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
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
    adapt: Adapt = None,
    setting: AdaptSetting = None,
    as_json: Json = False,
) -> None:
    """Measure the time from the last bin of each frame to its text, with bins in real time and one thread."""
    from arcuate.live.bench import bench_live

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
            adapt=adapt,
            adapt_settings=setting,
            progress=report,
        )
    emit_json(result.to_dict()) if as_json else out.print(result.summary(), soft_wrap=True)
