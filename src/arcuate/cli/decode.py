"""`arcuate decode`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import (
    AddedWords,
    Beam,
    Head,
    Json,
    LexiconFile,
    LmFile,
    MovedStore,
    ReferencesFile,
    ScoresPath,
    SplitName,
    WeightsFile,
    app,
)
from arcuate.cli.console import emit_json, progress, say
from arcuate.cli.console import out as stdout
from arcuate.errors import UserError
from arcuate.hub import is_hub_name

if TYPE_CHECKING:
    from arcuate.evaluation.decode import Transcription


@app.command()
def decode(
    scores: ScoresPath,
    file: Annotated[
        Path | None,
        typer.Argument(help="With `logits` as the first argument: logits of another program (.npz, .npy, .mat, .pkl)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="JSON lines file to write, one line per trial; default: in the run folder."),
    ] = None,
    lexicon: LexiconFile = "default",
    lm: LmFile = "default",
    beam: Beam = None,
    config: WeightsFile = None,
    references: ReferencesFile = None,
    n_best: Annotated[
        int, typer.Option("--nbest", "--n-best", min=1, max=10_000, help="Hypotheses to write per trial.")
    ] = 10,
    word: AddedWords = None,
    split: SplitName = "val",
    data: MovedStore = None,
    head: Head = None,
    reject_below: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Mark sentences as rejected if their probability of being correct is lower."
        ),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="With a run folder: best, last, step-NNNNNNNN or stage-NAME.")
    ] = "best",
    as_json: Json = False,
) -> None:
    """Decode frame scores (phoneme log-probabilities) to words, with a pronunciation lexicon and a language model."""
    from arcuate.evaluation.decode import decode as decode_words
    from arcuate.exported.file import is_export

    if file is not None:
        if str(scores) != "logits":
            raise UserError(f"unexpected argument {file}; to decode logits: arcuate decode logits {file} --out OUT")
        scores = file
    if out is None and not is_hub_name(scores) and not scores.is_dir() and not is_export(scores):
        raise UserError(
            "--out is required with a file of frame scores; give the file to write, one JSON line per trial"
        )
    replaces = out is not None and out.is_file() and out.stat().st_size > 0
    with progress("loading") as report:
        transcription = decode_words(
            scores,
            split=split,
            lexicon=lexicon,
            lm=lm,
            out=out,
            n_best=n_best,
            config=config,
            references=references,
            beam=beam,
            words=word or (),
            data=data,
            head=head,
            reject_below=reject_below,
            checkpoint=checkpoint,
            progress=report,
        )
    if replaces:
        say(f"replaced the earlier {out}")
    emit_json(transcription.to_dict()) if as_json else print_transcription(transcription)


def print_transcription(transcription: "Transcription") -> None:
    """Print the first texts, error rates and computation time."""
    for transcript in transcription[:3]:
        stdout.print(f"  {transcript.text}", soft_wrap=True, markup=False)
    stdout.print(transcription.summary(), soft_wrap=True)
    if (confidence := transcription.metrics.confidence) is not None:
        stdout.print(confidence.summary(), soft_wrap=True)
