"""`arcuate lm`: import, build, score, mix, describe and export n-gram language models."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from arcuate.cli.app import Json, SeveralNumbers, app
from arcuate.cli.console import emit_json, out, percent, progress, say

_SMALL_VOCABULARY = 20_000  # the packaged model has 73,000 words
_lm_app = typer.Typer(help="Language models: import, build, score, mix, info, export.", no_args_is_help=True)

_ModelName = Annotated[str, typer.Argument(help="Model file, ARPA file, or `default` (English, embedded).")]
_OutFile = Annotated[Path, typer.Argument(help="Model file to write.")]
_Against = Annotated[
    Path | None,
    typer.Option(
        help="Evaluation text to check for leakage: report how many of its sentences are in the model's training text."
    ),
]


@_lm_app.command("import")
def lm_import(
    source: Annotated[str, typer.Argument(help="ARPA file, plain or gzipped, or `default`.")],
    out: _OutFile,
    as_json: Json = False,
) -> None:
    """Convert an ARPA file of any order to a memory-mapped model file."""
    from arcuate.language.ngram.open import import_model

    with progress("importing") as report:
        result = import_model(source, out, progress=report)
    _print(result.to_dict(), as_json)


@_lm_app.command("build", cls=SeveralNumbers)
def lm_build(
    corpus: Annotated[Path, typer.Argument(help="Text with one sentence per line, plain or gzipped.")],
    out: _OutFile,
    order: Annotated[int, typer.Option(help="Length of the longest n-grams.")] = 4,
    prune: Annotated[
        list[int] | None,
        typer.Option(help="Drop n-grams with counts up to this value, one value per order, e.g. --prune 0 0 1."),
    ] = None,
    more: Annotated[
        list[Path] | None, typer.Option("--more", help="Additional text to train on; can be repeated.")
    ] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Normalise sentences as for the word error rate.")
    ] = False,
    leave_out: Annotated[Path | None, typer.Option(help="Text whose sentences are excluded from training.")] = None,
    against: _Against = None,
    as_json: Json = False,
) -> None:
    """Estimate a model from text: modified Kneser–Ney with interpolation."""
    from arcuate.language.ngram.estimate import build_model

    with progress("building") as report:
        result = build_model(
            [corpus, *(more or ())],
            out,
            order=order,
            prune=prune or (),
            normalise=normalise,
            leave_out=leave_out,
            against=against,
            progress=report,
        )
    _print(result.to_dict(), as_json)
    if result.info.n_words < _SMALL_VOCABULARY and not as_json:
        say(
            f"with {result.info.n_words:,} words this is a poor model of English alone; interpolate it with the"
            f" packaged one: arcuate lm mix {out} default MIXED --tune HELD_OUT.txt"
        )


@_lm_app.command("score")
def lm_score(
    model: _ModelName,
    text: Annotated[str, typer.Argument(help="Text with one sentence per line; - for standard input.")] = "-",
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Normalise sentences as for the word error rate.")
    ] = False,
    against: _Against = None,
    as_json: Json = False,
) -> None:
    """Report the perplexity of a text, its out-of-vocabulary words, and its overlap with the training text."""
    from arcuate.language.ngram.perplexity import score_text

    with progress("scoring") as report:
        result = score_text(model, text, normalise=normalise, against=against, progress=report)
    if as_json:
        emit_json(result.to_dict())
        return
    out.print(f"perplexity {_format(result.perplexity)}, with unknown words {_format(result.perplexity_with_oov)}")
    words = f"{result.n_words:,} words in {result.n_sentences:,} sentences"
    out.print(f"{words}, {result.n_oov:,} unknown ({percent(result.oov_rate)})")
    if result.oov_words:
        out.print("unknown: " + " ".join(result.oov_words), markup=False, soft_wrap=True)
    if result.n_in_training_text:
        out.print(
            f"{result.n_in_training_text:,} of the sentences are in the model's training text; perplexity of the"
            f" others {_format(result.perplexity_unseen)}"
        )


@_lm_app.command("mix", cls=SeveralNumbers)
def lm_mix(
    models: Annotated[list[str], typer.Argument(help="Two or more models, then the file to write.")],
    tune: Annotated[Path | None, typer.Option(help="Held-out text to tune the weights on.")] = None,
    weight: Annotated[list[float] | None, typer.Option(help="Weights, one per model.")] = None,
    as_json: Json = False,
) -> None:
    """Interpolate several models into one."""
    from arcuate.language.ngram.mix import mix_models

    with progress("mixing") as report:
        result = mix_models(models[:-1], models[-1], tune=tune, weights=weight or (), progress=report)
    _print(result.to_dict(), as_json)


@_lm_app.command("info")
def lm_info(
    model: _ModelName,
    as_json: Json = False,
) -> None:
    """Verify a model, and show its order, sizes and origin."""
    from arcuate.language.ngram.open import model_info

    with progress("opening") as report:
        result = model_info(model, progress=report)
    _print(result.to_dict(), as_json)


@_lm_app.command("export")
def lm_export(
    model: _ModelName,
    out: Annotated[Path, typer.Argument(help="ARPA file to write, .arpa or .arpa.gz.")],
    as_json: Json = False,
) -> None:
    """Write a model as an ARPA file for other tools."""
    from arcuate.language.ngram.open import export_model

    with progress("exporting") as report:
        result = export_model(model, out, progress=report)
    _print(result.to_dict(), as_json)


def _print(result: dict[str, Any], as_json: bool) -> None:
    """Print a result as JSON, or as a table of names and values."""
    if as_json:
        emit_json(result)
        return
    table = Table(box=None, show_header=False)
    for key, value in result.items():
        if isinstance(value, dict):
            for inner, item in value.items():
                table.add_row(Text(f"{key}.{inner}"), Text(_format(item)))
        elif value is not None:
            table.add_row(Text(key), Text(_format(value)))
    out.print(table)


def _format(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_format(item) for item in value)
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


app.add_typer(_lm_app, name="lm")
