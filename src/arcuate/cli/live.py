"""`arcuate live`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import app, complete_from
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


@app.command()
def live(
    run: RunPath,
    source: Annotated[
        str,
        typer.Option(
            help="replay, socket, lsl, redis or redis-logits.",
            autocompletion=complete_from("replay", "socket", "lsl", "redis", "redis-logits"),
        ),
    ] = "replay",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but this machine needs a token.")
    ] = "127.0.0.1",
    token: Annotated[str | None, typer.Option(help="Needed by viewers; made up for other addresses.")] = None,
    lm: Lm = "default",
    lexicon: LexiconFile = "default",
    no_words: NoWords = False,
    config: Weights = None,
    beam: Beam = None,
    llm: Annotated[
        Path | None, typer.Option(help="Rescore every sentence at its end with a causal language model.")
    ] = None,
    data: Data = None,
    split: Annotated[str, typer.Option(help="What to replay: val, test, train or all.")] = "val",
    session: SessionName = None,
    speed: Annotated[float, typer.Option(min=0.1, max=64.0, help="Of the replay; 1 = real time.")] = 1.0,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Replay: find sentences by silence, not by trial.")
    ] = False,
    record: Annotated[Path | None, typer.Option(help="Write the session here; a killed one goes on.")] = None,
    day: Annotated[
        str | None, typer.Option(help="With --record: name of this day, if the model does not know it yet.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="YAML file of live settings, see docs/live.md.")
    ] = None,
    silence: Annotated[
        float | None, typer.Option(min=0.1, max=60.0, help="Seconds of silence that end a sentence.")
    ] = None,
    closed: Annotated[
        bool, typer.Option("--closed", help="Decode nothing until opened on the page.")
    ] = False,
    phrase: Annotated[
        str | None, typer.Option(help="Decode nothing until this sentence (or a key) opens it.")
    ] = None,
    stream: Annotated[
        str | None, typer.Option(help="Name of the LSL stream, or of the Redis stream.")
    ] = None,
    redis: Annotated[str, typer.Option(help="Redis server.")] = "redis://127.0.0.1:6379",
    adapt: Adapt = None,
    setting: AdaptSetting = None,
) -> None:
    """Serve a page on which speech appears as it is attempted (extra: live)."""
    from arcuate.cli._live import Asked, live_command

    live_command(
        Asked(
            run,
            source,
            host,
            port,
            token,
            None if no_words else lm,
            lexicon,
            config,
            llm,
            beam,
            data,
            split,
            session,
            speed,
            continuous,
            record,
            settings,
            silence,
            closed,
            phrase,
            stream,
            redis,
            adapt,
            tuple(setting or ()),
            day,
        )
    )
