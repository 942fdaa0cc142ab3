"""Several processes training one model: who am I, and sums over all of us."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from arcuate.errors import UserError


@dataclass(frozen=True)
class World:
    """This process among all that train together; alone it is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Only one process writes the run folder and the terminal."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The values added up over all processes, the same on each."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any process says so; the answer is the same on each, and costs the device nothing."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor([int(flag)])).item())

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """All go on, or none does: where one process has to refuse, the others end with it."""
        problem: UserError | OSError | None = None
        try:
            yield
        except (UserError, OSError) as error:
            problem = error
        refused = self.any(problem is not None)
        if problem is not None:
            raise problem
        if refused:
            raise UserError(f"process {self.rank} ends, for another one cannot go on and says why")

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def join_world(device: torch.device) -> World:
    """Join the group that torchrun describes in the environment; without torchrun, a world of one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World()
    given = os.environ["WORLD_SIZE"]
    if not given.isdecimal():
        raise UserError(
            f"WORLD_SIZE is {given!r:.40}, no number; torchrun sets it: start with torchrun, or unset it"
        )
    size = int(given)
    if size == 1:
        return World()
    if device.type == "mps":
        raise UserError("several processes cannot share an mps device; start without torchrun")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return World(dist.get_rank(), size)


def leave_world() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
