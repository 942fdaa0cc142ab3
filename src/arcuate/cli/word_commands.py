"""Commands from frame scores to words: decode, tune, rescore, combine, submit."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Json, app

ScoresPath = Annotated[Path, typer.Argument(help="Frame scores (.npz), or a run folder.")]

LexiconName = Annotated[str, typer.Option("--lexicon", help="Lexicon file, or `default` (English).")]

LmOption = Annotated[str, typer.Option("--lm", help="Model file, ARPA file, or `default` (English).")]

RefsPath = Annotated[Path | None, typer.Option("--references", help="JSON lines with `text`, a trial each.")]

ConfigPath = Annotated[Path | None, typer.Option("--config", help="Weights, from `arcuate tune`.")]

Beam = Annotated[int | None, typer.Option("--beam", min=1, max=1_000_000, help="Readings kept per frame.")]

Threshold = Annotated[float | None, typer.Option("--threshold", help="Worst reading kept, in nat.")]

SplitName = Annotated[str, typer.Option("--split", help="Of a run folder: val, test, dev or train.")]

DataPath = Annotated[Path | None, typer.Option("--data", help="Of a run folder: the store, if it moved.")]

Words = Annotated[
    list[str] | None, typer.Option("--word", help="Add a word: word, word=weight or word=weight=PHONEMES.")
]


@app.command()
def decode(
    scores: ScoresPath,
    out: Annotated[Path, typer.Option("--out", help="JSON lines to write, a trial each.")] = ...,  # type: ignore[assignment]
    lexicon: LexiconName = "default",
    lm: LmOption = "default",
    beam: Beam = None,
    threshold: Threshold = None,
    config: ConfigPath = None,
    references: RefsPath = None,
    nbest: Annotated[int, typer.Option(min=1, max=10_000, help="Readings to write per trial.")] = 10,
    word: Words = None,
    split: SplitName = "val",
    data: DataPath = None,
    head: Annotated[str, typer.Option(help="Of a run: ctc, or both, where it has a transducer.")] = "ctc",
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: best, last, step-NNNNNNNN or stage-NAME.")
    ] = "best",
    as_json: Json = False,
) -> None:
    """Frame scores to words, with a pronunciation lexicon and a language model."""
    from arcuate.cli.decode import Source, decode_command

    source = Source(
        *(scores, lexicon, lm, config, references, beam, threshold, split, data, tuple(word or ())),
        *(head, checkpoint),
    )
    decode_command(source, out, nbest, as_json)


@app.command()
def tune(
    scores: ScoresPath,
    out: Annotated[Path, typer.Option("--out", help="YAML file of weights to write.")] = ...,  # type: ignore[assignment]
    lexicon: LexiconName = "default",
    lm: LmOption = "default",
    references: RefsPath = None,
    config: ConfigPath = None,
    beam: Beam = None,
    threshold: Threshold = None,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds to spend.")] = 300.0,
    folds: Annotated[int, typer.Option(min=0, max=100, help="Cross-fit by session; 0 = do not.")] = 0,
    split: SplitName = "val",
    data: DataPath = None,
    as_json: Json = False,
) -> None:
    """Find the weights of `decode` on trials with references."""
    from arcuate.cli.decode import Source, tune_command

    source = Source(scores, lexicon, lm, config, references, beam, threshold, split, data)
    tune_command(source, out, budget, folds, as_json)


@app.command()
def rescore(
    hyps: Annotated[Path, typer.Argument(help="Decodings with n-best lists, from `arcuate decode --out`.")],
    llm: Annotated[Path, typer.Option(help="A causal language model: a folder or a .gguf file.")] = ...,  # type: ignore[assignment]
    references: Annotated[
        Path | None, typer.Option(help="Lines with id and text, to fit on and score.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of the causal model; left out: fitted.")
    ] = None,
    acoustic: Annotated[float | None, typer.Option(min=0.0, help="Weight of the sound.")] = None,
    length: Annotated[float | None, typer.Option(help="Per word.")] = None,
    n_best: Annotated[int | None, typer.Option(min=1, help="Only the first entries of each list.")] = None,
    context: Annotated[
        Path | None, typer.Option(help="A text the model reads before every sentence.")
    ] = None,
    folds: Annotated[int, typer.Option(min=2, max=100, help="Of sessions, for fitting.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the decodings with their new scores.")] = None,
    as_json: Json = False,
) -> None:
    """Score n-best lists anew with a causal language model (extra: llm)."""
    from arcuate.cli.rescore import Asked, rescore_command

    rescore_command(
        Asked(hyps, llm, references, alpha, acoustic, length, n_best, context, folds, out), as_json
    )


@app.command()
def combine(
    sources: Annotated[
        list[Path],
        typer.Argument(help="A .jsonl with candidates per trial; or several runs, .jsonl or .npz files."),
    ],
    method: Annotated[
        str, typer.Option(help="linear, mbr or rover for words; arithmetic or geometric for frame scores.")
    ] = "auto",
    split: Annotated[str, typer.Option(help="Of runs: whose results to take.")] = "val",
    label: Annotated[str | None, typer.Option(help="Of runs: results/<split>.<label>.jsonl.")] = None,
    voters: Annotated[str, typer.Option(help="equal, or weighted by their agreement.")] = "equal",
    scale: Annotated[float, typer.Option(min=0.0, help="Of scores, before they become probabilities.")] = 1.0,
    lm: Annotated[str | None, typer.Option(help="An n-gram model as one more criterion.")] = None,
    llm: Annotated[Path | None, typer.Option(help="A causal language model as one more criterion.")] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Fit the weights of the criteria; each trial by the other folds.")
    ] = False,
    folds: Annotated[int, typer.Option(min=2, max=100)] = 5,
    weights: Annotated[Path | None, typer.Option(help="Weights fitted before.")] = None,
    save_weights: Annotated[Path | None, typer.Option(help="Write the weights fitted on all trials.")] = None,
    references: Annotated[Path | None, typer.Option(help="Lines with id and text, to score against.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the combined texts (.jsonl) or scores (.npz).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Combine several decoders' readings, word by word or frame by frame."""
    from arcuate.cli.combine import Asked, combine_command

    asked = Asked(
        sources,
        method,
        split,
        label,
        voters,
        scale,
        lm,
        llm,
        fit,
        folds,
        weights,
        save_weights,
        references,
        out,
    )
    combine_command(asked, as_json)


@app.command()
def submit(
    run: Annotated[Path, typer.Argument(help="A run folder with word decodings, or a file of them.")],
    out: Annotated[Path, typer.Option(help="File to write: CSV for '25, text for '24.")] = ...,  # type: ignore[assignment]
    split: Annotated[str, typer.Option(help="test, or another to try out.")] = "test",
    label: Annotated[str | None, typer.Option(help="Of results/<split>.<label>.jsonl.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="b2t25 or b2t24; else by the session names.")
    ] = None,
    allow_empty: Annotated[bool, typer.Option("--allow-empty", help="Hand in empty texts too.")] = False,
    as_json: Json = False,
) -> None:
    """Write decoded texts as the benchmarks want them handed in."""
    from arcuate.cli.submit import submit_command

    submit_command(run, out, split, label, format_, allow_empty, as_json)
