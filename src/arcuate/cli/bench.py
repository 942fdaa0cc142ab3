"""`arcuate bench`."""

from typing import Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.options import (
    Adapt,
    AdaptSetting,
    Beam,
    Data,
    LexiconFile,
    Lm,
    NoWords,
    RunPath,
    SessionName,
    Weights,
)

bench_app = typer.Typer(help="Measure how fast things are on this machine.", no_args_is_help=True)


app.add_typer(bench_app, name="bench")


@bench_app.command("live")
def bench_live(
    run: RunPath,
    seconds: Annotated[float, typer.Option(min=1.0, max=86_400.0, help="Of recording to replay.")] = 60.0,
    fast: Annotated[bool, typer.Option("--fast", help="As fast as it goes, not in real time.")] = False,
    lm: Lm = "default",
    lexicon: LexiconFile = "default",
    no_words: NoWords = False,
    config: Weights = None,
    beam: Beam = None,
    data: Data = None,
    split: Annotated[str, typer.Option(help="What to replay: val, test, train or all.")] = "val",
    session: SessionName = None,
    adapt: Adapt = None,
    setting: AdaptSetting = None,
    as_json: Json = False,
) -> None:
    """Time every frame from its last bin to the text, bin by bin in real time, on one thread."""
    from arcuate.cli._live import Asked, bench_command

    words = None if no_words else lm
    asked = Asked(
        run,
        lm=words,
        lexicon=lexicon,
        weights=config,
        beam=beam,
        data=data,
        split=split,
        session=session,
        adapt=adapt,
        adapting=tuple(setting or ()),
    )
    bench_command(asked, seconds, not fast, as_json)
