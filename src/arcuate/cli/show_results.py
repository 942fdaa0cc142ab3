"""What the commands that evaluate and decode print."""

from typing import TYPE_CHECKING, Any

from arcuate.cli.console import Given, out, percent, print_table, say

if TYPE_CHECKING:
    from arcuate.evaluation.decode import Transcription
    from arcuate.evaluation.evaluate import Evaluation
    from arcuate.evaluation.robustness import RobustnessResult
    from arcuate.evaluation.tune import TunedWeights
    from arcuate.experiments.selftest import SelfTest


def evaluation(evaluation: "Evaluation", given: Given) -> None:
    """Print the error rate by session and in total."""
    from arcuate.data.alphabet import error_rate_name

    metrics, split = evaluation.metrics, evaluation.provenance.split
    name = error_rate_name(evaluation.classes)
    if evaluation.adaptation is not None:
        _print_adapted_sessions(evaluation, f"{name} by session ({split})")
    elif rows := [(session, percent(rate)) for session, rate in metrics.per_by_session.items()]:
        print_table(("session", name), rows, title=f"{name} by session ({split})", right=(name,))
    if metrics.per_by_mode:
        accuracy = metrics.mode_accuracy
        correct = "" if accuracy is None else f"; mode predicted correctly in {percent(accuracy)} of trials"
        out.print(", ".join(f"{mode} {percent(rate)}" for mode, rate in metrics.per_by_mode.items()) + correct)
    out.print(evaluation.summary(), soft_wrap=True)
    say(f"one line per trial in {evaluation.results_file}")


def _print_adapted_sessions(evaluation: "Evaluation", title: str) -> None:
    assert evaluation.adaptation is not None
    sessions = evaluation.adaptation.sessions
    names, numbers = ("session", "initial layer"), ("trials", "unadapted", "adapted", "steps", "fall-backs")
    rows = [
        (
            *(row.session, "its own" if row.known else row.init_session, str(row.n_trials)),
            *(percent(row.per_unadapted), percent(row.per), str(row.n_steps), str(row.n_fallbacks)),
        )
        for row in sessions
    ]
    print_table((*names, *numbers), rows, title=title, right=numbers)
    if new := [row.session for row in sessions if not row.known]:
        say(
            "with a few cued sentences, calibration lowers the error rate further:"
            f" arcuate calibrate RUN --session {new[-1]} --sentences 20"
        )


def transcription(transcription: "Transcription", given: Given) -> None:
    """Print the first texts, error rates and computation time."""
    for transcript in transcription[:3]:
        out.print(f"  {transcript.text}", soft_wrap=True, markup=False)
    out.print(transcription.summary(), soft_wrap=True)
    if (confidence := transcription.metrics.confidence) is not None:
        out.print(confidence.summary(), soft_wrap=True)


def weights(tuned: "TunedWeights", given: Given) -> None:
    out.print(tuned.summary(), soft_wrap=True)
    if given.get("out") is not None:
        say(f"wrote {given['out']}; use it with: arcuate decode … --config {given['out']}")


def robustness(result: "RobustnessResult", given: Given) -> None:
    from arcuate.data.alphabet import error_rate_name

    names = list(result.mce)
    rows = [(e.name, *(percent(e.mean(name)) for name in names)) for e in result.corruptions]
    heading = f"{error_rate_name(result.classes)}, mean of severities"
    print_table((heading, *names), rows, title=f"Robustness ({given.get('split', 'val')})", right=names)
    out.print(result.summary(), soft_wrap=True)


def submission(result: Any, given: Given) -> None:
    out.print(f"{given['out']}", soft_wrap=True, markup=False)


def selftest(result: "SelfTest", given: Given) -> None:
    rows = [
        (c.status, c.name, "" if c.value is None else str(c.value), str(c.bound or ""), c.remedy or "")
        for c in result.checks
    ]
    print_table(("status", "check", "value", "bound", "remedy or reason"), rows, fold=True)
    n_skipped = sum(c.status == "skipped" for c in result.checks)
    outcome = f"{result.n_failed} failed, {n_skipped} skipped, {result.seconds:.0f} s"
    say(f"{len(result.checks)} checks on {result.device['type']}: {outcome}")
    say("attach the output of --json to a bug report")
