"""`arcuate launch`."""

from typing import Annotated

import typer

from arcuate.cli.app import Json, WithDefault, app
from arcuate.cli.console import counted, emit_json, out, say
from arcuate.errors import UserError

_launch_app = typer.Typer(help="Submit a command as a batch job on a cluster.", no_args_is_help=True)
app.add_typer(_launch_app, name="launch")


@_launch_app.command()
def slurm(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="train, sweep or ablate with its options.")
    ],
    time: Annotated[
        str, typer.Option(help="Time limit, after which the job is requeued: minutes, HH:MM:SS or D-HH:MM:SS.")
    ] = "60",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs per node; one process for each.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Processes per node, without GPUs.")] = 1,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores per process.")] = None,
    memory: Annotated[str | None, typer.Option("--mem", help="Memory per node, such as 64G.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    name: Annotated[str, typer.Option(help="Name of the job.")] = "arcuate",
    sbatch: Annotated[list[str] | None, typer.Option(help="Any other option of sbatch, such as nice=100.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="Shell command to run first, such as 'module load cuda'.")
    ] = None,
    signal: Annotated[int, typer.Option(min=1, help="Save and stop this many seconds before the time limit.")] = 120,
    requeues: Annotated[int, typer.Option(min=0, help="Maximum number of times the job is requeued.")] = 100,
    workers: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of jobs that work on the same sweep or ablation.")
    ] = 1,
    parallel: Annotated[
        int, typer.Option(min=1, help="Maximum number of array tasks that run at the same time.")
    ] = 256,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script; submit nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Submit train, sweep or ablate to Slurm; a job that reaches its time limit is requeued and resumes."""
    from arcuate.experiments.launch import SlurmSettings, launch

    _check(command)
    settings = SlurmSettings(
        time=time,
        nodes=nodes,
        processes=processes,
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        partition=partition,
        account=account,
        qos=qos,
        name=name,
        sbatch=dict(_split(text) for text in sbatch or []),
        setup=tuple(setup or []),
        signal_s=signal,
        max_requeues=requeues,
        parallel=parallel,
    )
    job = launch(command, settings, n_workers=workers, dry_run=dry_run)
    if as_json:
        emit_json(job.to_dict())
    elif dry_run:
        out.print(job.script, markup=False, highlight=False, soft_wrap=True, end="")
    else:
        say(f"submitted job {job.job} ({counted(len(job.tasks), 'task')}); logs: {job.folder}")


def _split(text: str) -> tuple[str, str]:
    key, _, value = text.lstrip("-").partition("=")
    if not value:
        raise UserError(f"--sbatch {text}: expected key=value, such as nice=100")
    return key, value


def _check(command: list[str]) -> None:
    """Reject an unknown or missing option of the command now, instead of in the job."""
    known = getattr(typer.main.get_command(app), "commands", {}).get(command[0])
    if isinstance(known, WithDefault):
        known = known.commands[known.default]
    if known is not None:
        known.make_context(f"arcuate {command[0]}", list(command[1:]))
