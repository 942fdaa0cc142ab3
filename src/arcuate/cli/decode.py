"""`arcuate decode`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import Json, app
from arcuate.cli.options import (
    AddedWords,
    Beam,
    Head,
    LexiconFile,
    LmFile,
    MovedStore,
    ReferencesFile,
    ScoresPath,
    SplitName,
    Threshold,
    WeightsFile,
)

if TYPE_CHECKING:
    from arcuate.evaluation.decode import Transcription


@app.command()
def decode(
    scores: ScoresPath,
    out: Annotated[Path, typer.Option("--out", help="JSON lines to write, one per trial.")] = ...,  # type: ignore[assignment]
    lexicon: LexiconFile = "default",
    lm: LmFile = "default",
    beam: Beam = None,
    threshold: Threshold = None,
    config: WeightsFile = None,
    references: ReferencesFile = None,
    n_best: Annotated[
        int, typer.Option("--nbest", "--n-best", min=1, max=10_000, help="Hypotheses to write per trial.")
    ] = 10,
    word: AddedWords = None,
    split: SplitName = "val",
    data: MovedStore = None,
    head: Head = None,
    checkpoint: Annotated[
        str, typer.Option(help="With a run folder: best, last, step-NNNNNNNN or stage-NAME.")
    ] = "best",
    as_json: Json = False,
) -> None:
    """Decode frame scores to words, with a pronunciation lexicon and a language model."""
    from arcuate.cli.console import emit_json, progress
    from arcuate.evaluation.decode import decode as decode_words

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
            threshold=threshold,
            words=word or (),
            data=data,
            head=head,
            checkpoint=checkpoint,
            progress=report,
        )
    emit_json(transcription.to_dict()) if as_json else print_transcription(transcription)


def print_transcription(transcription: "Transcription") -> None:
    """Print the first texts, error rates and cost."""
    from arcuate.cli.console import out
    from arcuate.progress import percent

    metrics, words = transcription.metrics, transcription.metrics.words
    for transcript in transcription[:3]:
        out.print(f"  {transcript.text}", soft_wrap=True, markup=False)
    if words.wer is not None:
        caveat = " (the weights were tuned on these trials)" if transcription.tuned_on_these else ""
        out.print(
            f"WER {percent(words.wer)}, 95 % interval {percent(words.wer_low)} to {percent(words.wer_high)};"
            f" CER {percent(words.cer)}; language model {transcription.search.lm}"
            f"{_describe_head(transcription)}{caveat}",
            soft_wrap=True,
        )
    seconds = metrics.seconds_per_sentence
    written = f"; one line per trial in {transcription.out}" if transcription.out else ""
    out.print(
        f"{len(transcription)} trials, {'–' if seconds is None else f'{1000 * seconds:.1f}'} ms of search per sentence,"
        f" {metrics.peak_rss_mb:.0f} MB{written}",
        soft_wrap=True,
    )


def _describe_head(transcription: "Transcription") -> str:
    head = transcription.search.head
    return {"ctc": "", "transducer": "; transducer head", "both": "; both heads"}[head]
