"""`arcuate sweep`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arcuate.cli.app import Json, OverrideList, RecipeName, StorePath, WithDefault, WithSettings, app
from arcuate.cli.console import emit_json, out, percent, print_table, say

if TYPE_CHECKING:
    from arcuate.experiments.sweep import SweepResult, SweepTrial


_sweep_app = typer.Typer(
    help="Search hyperparameters (`arcuate sweep RECIPE SPACE …`), or show the status of a sweep.",
    cls=WithDefault,
    no_args_is_help=True,
)
app.add_typer(_sweep_app, name="sweep")

StorageUrl = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar="ARCUATE_STORAGE",
        show_envvar=True,
        help="URL of the study's storage: postgresql://USER@HOST/DATABASE, sqlite:///FILE or grpc://HOST:PORT.",
    ),
]


@_sweep_app.command(cls=WithSettings)
def run(
    recipe: RecipeName,
    space: Annotated[Path, typer.Argument(help="YAML file: settings, each with a range or choices.")],
    overrides: OverrideList = None,
    data: StorePath = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option("--out", help="Sweep folder; one run folder per configuration.")] = ...,  # type: ignore[assignment]
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Number of configurations over all workers.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled settings.")] = 0,
    storage: StorageUrl = None,
    heartbeat: Annotated[
        int,
        typer.Option(
            min=1,
            help="With a database: seconds between heartbeats; a worker that misses four is considered dead.",
        ),
    ] = 30,
    as_json: Json = False,
) -> None:
    """Search hyperparameters; `run` may be omitted. Start the same command several times for parallel workers."""
    from arcuate.experiments.sweep import sweep

    result = sweep(
        *(recipe, space, data, out),
        overrides=overrides or [],
        n_trials=trials,
        seed=seed,
        storage=storage,
        heartbeat_s=heartbeat,
    )
    if as_json:
        emit_json(result.to_dict())
    else:
        _print_result(result)
    if result.signal is not None:
        say(f"stopped by {result.signal.name}; run the same command again to continue")
        raise typer.Exit(128 + result.signal)
    raise typer.Exit(1 if all(t.state == "fail" for t in result.trials) else 0)


def _print_result(result: "SweepResult") -> None:
    rows = [
        (str(t.number), t.state, percent(t.per), _where(t), "\n".join(t.overrides), t.reason or "")
        for t in sorted(result.trials, key=_rank)
    ]
    print_table(("trial", "state", result.rate_name, "step", "settings", "reason"), rows, fold=True)
    if running := sum(t.state == "running" for t in result.trials):
        say(f"{running} still running")
    if result.best is None or result.command is None:
        say("no trial is complete")
        return
    out.print(f"\nbest: trial {result.best.number}, {result.rate_name} {percent(result.best.per)}, {result.best.run}")
    out.print(shlex.join(result.command), markup=False, soft_wrap=True)


def _where(trial: "SweepTrial") -> str:
    step = "" if trial.step is None else str(trial.step)
    return f"{step} on {trial.host}".strip() if trial.state == "running" and trial.host else step


def _rank(trial: "SweepTrial") -> tuple[bool, float, int]:
    """Complete trials first, best on top."""
    per = float("inf") if trial.per is None else trial.per
    return trial.state != "complete", per, trial.number
