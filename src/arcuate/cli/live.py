"""`arcuate live`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import (
    Adapt,
    Beam,
    Head,
    LexiconFile,
    LmFile,
    ModelPath,
    NoWords,
    ReplayedStore,
    SessionName,
    WeightsFile,
    app,
    complete_from,
)
from arcuate.cli.console import progress


@app.command()
def live(
    run: ModelPath,
    source: Annotated[
        str,
        typer.Option(
            help="Source of bins: replay, socket, lsl, redis, redis-logits, or your own such as mylab.live:Source.",
            autocompletion=complete_from("replay", "socket", "lsl", "redis", "redis-logits"),
        ),
    ] = "replay",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8765,
    host: Annotated[
        str, typer.Option(help="Address to listen on; non-loopback addresses require a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar="ARCUATE_TOKEN",
            help="Token to open the page; default: none on loopback, random otherwise.",
        ),
    ] = None,
    send_token: Annotated[
        str | None,
        typer.Option(
            envvar="ARCUATE_SEND_TOKEN",
            help="Token that senders to --source socket need; default: none on loopback without --token, else random.",
        ),
    ] = None,
    lm: LmFile = "default",
    lexicon: LexiconFile = "default",
    no_words: NoWords = False,
    config: WeightsFile = None,
    beam: Beam = None,
    head: Head = None,
    llm: Annotated[Path | None, typer.Option(help="Causal language model that rescores every sentence.")] = None,
    data: ReplayedStore = None,
    split: Annotated[str, typer.Option(help="Split to replay: val, test, train or all.")] = "val",
    session: SessionName = None,
    speed: Annotated[float, typer.Option(min=0.1, max=64.0, help="Speed of the replay; 1 = real time.")] = 1.0,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="With a replay: split sentences at silences, not at trials.")
    ] = False,
    stored_statistics: Annotated[
        bool,
        typer.Option(
            "--stored-statistics",
            help="Replay: normalise by the statistics of offline evaluation, not by those of the stream.",
        ),
    ] = False,
    record: Annotated[
        Path | None, typer.Option(help="Folder to record into; an interrupted recording is resumed.")
    ] = None,
    record_session: Annotated[
        str | None, typer.Option(help="With --record: name of the session, if it is new to the model.")
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="YAML file of live settings, see docs/live.md.")] = None,
    silence: Annotated[
        float | None, typer.Option(min=0.1, max=60.0, help="Seconds of silence that end a sentence.")
    ] = None,
    closed: Annotated[
        bool, typer.Option("--closed", help="Start with decoding off; it is started on the page.")
    ] = False,
    phrase: Annotated[
        str | None,
        typer.Option(
            help="Wake phrase: text is hidden until this phrase is decoded or decoding is started on the page."
        ),
    ] = None,
    stream: Annotated[str | None, typer.Option(help="Name of the LSL or Redis stream.")] = None,
    redis: Annotated[
        str, typer.Option(envvar="ARCUATE_REDIS", help="URL of the Redis server.")
    ] = "redis://127.0.0.1:6379",
    adapt: Adapt = False,
) -> None:
    """Decode live and serve a page that shows the text as speech is attempted (extra: live)."""
    from arcuate.decoding.options import DecoderOptions
    from arcuate.live.serve import prepare_server
    from arcuate.models.layout import check_head

    with progress("loading the model, the lexicon and the language model") as report:
        server = prepare_server(
            run,
            source=source,
            host=host,
            port=port,
            token=token,
            send_token=send_token,
            options=DecoderOptions(
                lm="none" if no_words else str(lm),
                lexicon=str(lexicon),
                config=config,
                beam=beam,
                head=check_head(head),
                llm=llm,
                data=data,
                session=session,
                adapt=adapt,
            ),
            split=split,
            speed=speed,
            continuous=continuous,
            stored_statistics=stored_statistics,
            record=record,
            record_session=record_session,
            settings=settings,
            silence_s=silence,
            closed=closed,
            phrase=phrase,
            stream=stream,
            redis=redis,
            progress=report,
        )
    server.run()
