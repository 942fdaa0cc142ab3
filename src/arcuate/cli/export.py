"""`arcuate export`."""

from pathlib import Path
from typing import Annotated

import typer

from arcuate.cli.app import Head, Json, LexiconFile, LmFile, ModelPath, NoWords, WeightsFile, app
from arcuate.cli.console import emit_json, out, progress


@app.command()
def export(
    run: ModelPath,
    model: Annotated[Path, typer.Argument(help="File to write, such as model.arcx.")],
    session: Annotated[
        str | None, typer.Option("--session", help="Keep the layer of this session only; default: all sessions.")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantise matrix products to int8; the result is compared with fp32.")
    ] = False,
    no_words: NoWords = False,
    lm: LmFile = "default",
    lexicon: LexiconFile = "default",
    config: WeightsFile = None,
    head: Head = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, step-NNNNNNNN or stage-NAME.")] = "best",
    data: Annotated[
        Path | None, typer.Option("--data", help="Store for --int8 and --web; default: that of the run.")
    ] = None,
    web: Annotated[
        Path | None, typer.Option("--web", help="Folder for a page that runs the model of one session in the browser.")
    ] = None,
    ort_web: Annotated[
        Path, typer.Option("--ort-web", help="With --web: npm package folder of ONNX Runtime Web.")
    ] = Path("node_modules/onnxruntime-web"),
    as_json: Json = False,
) -> None:
    """Export a model to one file that decodes with ONNX Runtime, without torch (extra: export)."""
    from arcuate.experiments.export import export as export_run

    with progress("exporting") as report:
        result = export_run(
            run,
            model,
            session=session,
            int8=int8,
            words=not no_words,
            lm=lm,
            lexicon=lexicon,
            decoding=config,
            checkpoint=checkpoint,
            head=head,
            data=data,
            web=web,
            ort_web=ort_web,
            progress=report,
        )
    emit_json(result.to_dict()) if as_json else out.print(result.summary(), soft_wrap=True)
