"""`arcuate demo`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import Json, OverrideList, WithSettings, app
from arcuate.cli.console import TrainingDisplay, emit_json, out, say
from arcuate.cli.decode import print_transcription
from arcuate.cli.evaluate import print_evaluation
from arcuate.cli.prepare import leakage_line, print_summary

if TYPE_CHECKING:
    from arcuate.evaluation.decode import Transcription


@app.command(cls=WithSettings)
def demo(
    run: Annotated[Path, typer.Option(help="Run folder; an earlier demo there is replaced.")] = Path("runs/demo"),
    data: Annotated[Path, typer.Option(help="Data folder; an earlier demo there is replaced.")] = Path("data/demo"),
    overrides: OverrideList = None,
    as_json: Json = False,
) -> None:
    """Run the complete workflow on simulated data: simulate, prepare, train, evaluate, decode, report."""
    from arcuate.experiments.demo import run_demo
    from arcuate.insight.report import write_report

    display = TrainingDisplay()
    result = run_demo(
        *(run, data),
        write_report=write_report,
        overrides=overrides or [],
        callbacks=[display],
        progress=display.report,
    )
    display.close()
    if as_json:
        emit_json(result.to_dict())
        return
    print_summary(result.prepared.report, data / "store")
    say(leakage_line(result.prepared.leakage))
    print_evaluation(result.evaluation)
    _print_nbest(result.words)
    print_transcription(result.words)
    out.print(f"Open {result.page} in a browser. The demo took {result.seconds:.0f} s.", soft_wrap=True)


def _print_nbest(words: "Transcription") -> None:
    """The n-best list of one sentence, if possible one with errors."""
    with_errors = [t for t in words if t.word_errors and t.word_errors.errors and len(t.n_best) > 1]
    example = (with_errors or list(words))[0]
    out.print(f"\n  ref  {example.reference.text}", soft_wrap=True, markup=False)
    for rank, hypothesis in enumerate(example.n_best, 1):
        text = f"{rank:>5}  {hypothesis.text or '–'}  ({hypothesis.total:.1f})"
        out.print(text, soft_wrap=True, markup=False)
    out.print()
