"""The transducer loss compared with the same recursion under autograd: time and peak memory, forward and backward.

`loss` starts from given logits, `joined` from frames and predictions of width 512 and includes the
joiner; `reusing` writes the gradient into the logits. Memory is the peak resident size of a separate
process, minus its size before the loss is computed (which includes logits or inputs).
"""

import argparse
import os
import resource
import statistics
import sys
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import child, in_turns
from torch import Tensor, nn
from torch.nn import functional as F

from arcuate.losses import rnnt_loss
from arcuate.losses.rnnt import chunked_rnnt_loss

N_TRIALS, N_FRAMES, N_TOKENS, N_CLASSES, WIDTH = 8, 250, 60, 41, 512
CASES = ("loss naive", "loss arcuate", "loss reusing", "joined naive", "joined arcuate")


def naive_loss(logits: Tensor, targets: Tensor, n_frames: Tensor, n_tokens: Tensor) -> Tensor:
    """Log-softmax, then the forward recursion by anti-diagonals, differentiated by autograd; equal lengths only."""
    log_probs = logits.log_softmax(-1)
    blank = log_probs[..., 0]  # (B, T, U + 1)
    emit = log_probs[:, :, :-1].gather(-1, targets[:, None, :, None].expand(-1, logits.shape[1], -1, 1))[..., 0]
    n, columns = logits.shape[1] + targets.shape[1], targets.shape[1] + 1
    column = torch.arange(columns)
    skewed = []
    for scores in (blank, F.pad(emit, (0, 1), value=-1e30)):
        frame = torch.arange(n)[:, None] - column
        inside = (frame >= 0) & (frame < logits.shape[1])
        skewed.append(scores[:, frame.clamp(0, logits.shape[1] - 1), column].where(inside, -1e30))
    alpha = torch.full((len(logits), columns), -1e30)
    alpha[:, 0] = 0.0
    for i in range(n):
        up = F.pad(alpha[:, :-1] + skewed[1][:, i, :-1], (1, 0), value=-1e30)
        alpha = torch.logaddexp(alpha + skewed[0][:, i], up)
    return -alpha[:, -1]


def make(case: str) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(1, N_CLASSES, (N_TRIALS, N_TOKENS))
    lengths = torch.full((N_TRIALS,), N_FRAMES), torch.full((N_TRIALS,), N_TOKENS)
    naive = case.endswith("naive")
    if case.startswith("loss"):
        logits = torch.randn(N_TRIALS, N_FRAMES, N_TOKENS + 1, N_CLASSES, requires_grad=True)
        if naive:
            return lambda: naive_loss(logits, targets, *lengths)
        if case.endswith("reusing"):
            return lambda: rnnt_loss(logits.view_as(logits), targets, *lengths, reuse_logits=True)
        return lambda: rnnt_loss(logits, targets, *lengths)
    frames = torch.randn(N_TRIALS, N_FRAMES, WIDTH, requires_grad=True)
    predicted = torch.randn(N_TRIALS, N_TOKENS + 1, WIDTH, requires_grad=True)
    output = nn.Linear(WIDTH, N_CLASSES)
    join = lambda f, p: output(torch.tanh(f[:, :, None] + p[:, None]))
    if naive:
        return lambda: naive_loss(join(frames, predicted), targets, *lengths)
    return lambda: chunked_rnnt_loss(join, frames, predicted, targets, *lengths)


def warm_up() -> None:
    """Run everything once at a small size, so that loaded code is not counted."""
    global N_FRAMES, N_TOKENS, WIDTH
    size, (N_FRAMES, N_TOKENS, WIDTH) = (N_FRAMES, N_TOKENS, WIDTH), (3, 2, 8)
    for case in CASES:
        make(case)().sum().backward()
    N_FRAMES, N_TOKENS, WIDTH = size


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        run = make(arguments.memory)
        warm_up()
        base = peak_mb()
        run().sum().backward()
        print(peak_mb() - base)
        return
    megabytes = {case: float(child(sys.executable, __file__, "--memory", case).output) for case in CASES}
    runs = {case: make(case) for case in CASES}
    timed = in_turns({case: lambda run=run: run().sum().backward() for case, run in runs.items()}, arguments.repeats)  # type: ignore[misc]
    seconds = {case: statistics.median(values) for case, values in timed.items()}
    logits_mb = N_TRIALS * N_FRAMES * (N_TOKENS + 1) * N_CLASSES * 4 / 2**20
    print(f"T {N_FRAMES}, U {N_TOKENS}, V {N_CLASSES}: logits {logits_mb:.0f} MB; one thread, CPU seconds")
    for case in CASES:
        naive = f"{case.split()[0]} naive"
        memory, time = megabytes[naive] / megabytes[case], seconds[naive] / seconds[case]
        print(f"{case:15} {megabytes[case]:.0f} MB ({memory:.1f} x less), {seconds[case]:.2f} s ({time:.1f} x faster)")


if __name__ == "__main__":
    main()
