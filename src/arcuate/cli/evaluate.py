"""`arcuate evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import SPLITS, Json, app, complete_from


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or a model folder of arcuate import.")],
    split: Annotated[
        str, typer.Option(help="val, test, dev or train.", autocompletion=complete_from(*SPLITS))
    ] = "val",
    data: Annotated[Path | None, typer.Option(help="The store, if it moved since training.")] = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            help="best, last, step-NNNNNNNN or stage-NAME.", autocompletion=complete_from("best", "last")
        ),
    ] = "best",
    label: Annotated[str | None, typer.Option(help="Write results/<split>.<label>.jsonl.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Also write all frame scores to this .npz.")] = None,
    search: Annotated[str | None, typer.Option(help="greedy or beam; left out: as the recipe says.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, max=100_000, help="Width of the beam search.")] = None,
    head: Annotated[
        str,
        typer.Option(
            help="ctc, transducer, or both together; the last two with a beam of 8 unless told otherwise."
        ),
    ] = "ctc",
    adapt: Annotated[
        str | None,
        typer.Option(
            help="Follow days in order, unknown ones too: none, statistics, one-step, replay or entropy.",
            autocompletion=complete_from("none", "statistics", "one-step", "replay", "entropy"),
        ),
    ] = None,
    session: Annotated[list[str] | None, typer.Option(help="With --adapt: these sessions only.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="With --adapt: key=value, such as rate=5e-4.")
    ] = None,
    lm: Annotated[
        str | None, typer.Option(help="With --adapt: labels through this language model, or `default`.")
    ] = None,
    lexicon: Annotated[str, typer.Option(help="Of the language model, or `default`.")] = "default",
    config: Annotated[Path | None, typer.Option(help="Weights of the search, from `arcuate tune`.")] = None,
    as_json: Json = False,
) -> None:
    """Score a run on a split: PER with its interval, by session and block, one line per trial."""
    from arcuate.cli._evaluate import evaluate_command

    following = None
    if adapt is not None:
        from arcuate.cli._follow import Following

        following = Following(adapt, tuple(session or ()), tuple(setting or ()), lm, lexicon, config)
    elif session or setting or lm or config or lexicon != "default":
        raise typer.BadParameter("--session, --set, --lm, --lexicon and --config belong to --adapt METHOD")
    evaluate_command(run, split, data, checkpoint, label, scores, as_json, search, beam, head, following)
