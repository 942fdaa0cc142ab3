"""`arcuate lm`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Force, Json, SeveralNumbers, app
from arcuate.errors import UserError

lm_app = typer.Typer(help="Language models: import, build, score, mix, look at.", no_args_is_help=True)


LmName = Annotated[str, typer.Argument(help="A model file, an ARPA file, or `default` (English, embedded).")]


LmOut = Annotated[Path, typer.Argument(help="Model file to write.")]


@lm_app.command("import")
def lm_import(
    source: Annotated[str, typer.Argument(help="An ARPA file, plain or gzipped, or `default`.")],
    out: LmOut,
    recount: Annotated[
        bool, typer.Option("--recount", help="Accept a file whose head states wrong counts.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Turn an ARPA file of any order and any tool into a model file that is mapped, not loaded."""
    from arcuate.cli._lm import import_command

    import_command(source, out, recount, force, as_json)


@lm_app.command("build", cls=SeveralNumbers)
def lm_build(
    corpus: Annotated[Path, typer.Argument(help="Text with a sentence per line, plain or gzipped.")],
    out: LmOut,
    order: Annotated[int, typer.Option(help="Longest n-grams.")] = 4,
    prune: Annotated[
        list[int] | None,
        typer.Option(help="Per order, leave out n-grams seen no more often, as in --prune 0 0 1."),
    ] = None,
    more: Annotated[
        list[Path] | None, typer.Option("--more", help="Further text, any number of times.")
    ] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Normalise sentences as for scoring: lower case, no marks.")
    ] = False,
    leave_out: Annotated[
        Path | None, typer.Option(help="Do not train on the sentences of this text (evaluation data).")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Count how many sentences of this text were trained on.")
    ] = None,
    no_hashes: Annotated[
        bool,
        typer.Option("--no-hashes", help="Keep no hashes of the sentences; leakage cannot be told later."),
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Estimate a model from text: modified Kneser–Ney with interpolation."""
    from arcuate.cli._lm import Asked, build_command

    asked = Asked(
        [corpus, *(more or ())], out, order, prune or (), normalise, leave_out, against, not no_hashes, force
    )
    build_command(asked, as_json)


@lm_app.command("score")
def lm_score(
    model: LmName,
    text: Annotated[str, typer.Argument(help="Text with a sentence per line; - for standard input.")] = "-",
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Normalise sentences first: lower case, no marks.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(help="Count how many sentences of this text were trained on.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Perplexity of a text, unknown words, and sentences the model was trained on."""
    from arcuate.cli._lm import score_command

    score_command(model, text, normalise, against, as_json)


@lm_app.command("mix", cls=SeveralNumbers)
def lm_mix(
    models: Annotated[list[str], typer.Argument(help="Two or more models, then the file to write.")],
    tune: Annotated[Path | None, typer.Option(help="Held-out text; finds the weights.")] = None,
    weight: Annotated[list[float] | None, typer.Option(help="One per model, if they are known.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Interpolate several models into one."""
    from arcuate.cli._lm import mix_command

    if len(models) < 3:
        raise UserError("name at least two models and the file to write: arcuate lm mix A B OUT --tune TEXT")
    mix_command(models[:-1], Path(models[-1]), tune, weight or (), force, as_json)


@lm_app.command("info")
def lm_info(
    model: LmName,
    check: Annotated[bool, typer.Option("--check", help="Read the whole file and check all of it.")] = False,
    as_json: Json = False,
) -> None:
    """Order, sizes and origin of a model."""
    from arcuate.cli._lm import info_command

    info_command(model, check, as_json)


@lm_app.command("export")
def lm_export(
    model: LmName,
    out: Annotated[Path, typer.Argument(help="ARPA file to write, .arpa or .arpa.gz.")],
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a model as an ARPA file for other tools."""
    from arcuate.cli._lm import export_command

    export_command(model, out, force, as_json)


app.add_typer(lm_app, name="lm")
