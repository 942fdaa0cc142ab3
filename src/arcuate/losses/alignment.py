"""Forced alignment: the most probable CTC path of given tokens, and the cross-entropy on it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from arcuate.data.alphabet import BLANK


def forced_alignment(log_probs: Tensor, n_frames: Tensor, tokens: Tensor, n_tokens: Tensor) -> Tensor:
    """Class of every frame on the most probable CTC path of the tokens (Viterbi 1967); -1 where there is none. (B, F)

    States are the 2 U + 1 symbols blank, token 1, blank, …, token U, blank. A path enters a state from itself, from
    the one before it, or, if it is a token that differs from the previous token, from two before. All trials advance
    together, frame by frame; the best predecessors (F, B, S) are followed back from the last frame of each trial.
    Padding frames and trials whose tokens do not fit into their frames get -1.
    """
    n_trials, length, _ = log_probs.shape
    labels = tokens.long()
    states = labels.new_full((n_trials, 2 * labels.shape[1] + 1), BLANK)
    states[:, 1::2] = labels
    n_states = 2 * n_tokens.to(states.device) + 1
    index = torch.arange(states.shape[1], device=states.device)
    exists = index < n_states[:, None]
    before = F.pad(states[:, :-2], (2, 0), value=BLANK)
    may_skip = (states != BLANK) & (states != before)  # (B, S)
    scores = log_probs.detach().float().gather(2, states[:, None].expand(-1, length, -1))  # (B, F, S)
    scores = scores.masked_fill(~exists[:, None], -torch.inf)
    best = torch.where(index < 2, scores[:, 0], -torch.inf)
    steps = []  # best number of states to go back, per frame
    for t in range(1, length):
        once, twice = (F.pad(best[:, :-n], (n, 0), value=-torch.inf) for n in (1, 2))
        entered = torch.stack([best, once, torch.where(may_skip, twice, -torch.inf)])
        top, step = entered.max(0)
        running = (t < n_frames.to(best.device))[:, None]  # after its last frame a trial keeps its scores
        best = torch.where(running, top + scores[:, t], best)
        steps.append(torch.where(running, step, 0))
    last = (n_states - 1)[:, None]
    ends = torch.cat([last, (last - 1).clamp(min=0)], dim=1)
    final = best.gather(1, ends)
    state = ends.gather(1, final.argmax(1, keepdim=True))
    found = final.amax(1) > -torch.inf
    path = [states.gather(1, state)]
    for step in reversed(steps):
        state = state - step.gather(1, state)
        path.append(states.gather(1, state))
    aligned = torch.cat(path[::-1], dim=1)
    valid = torch.arange(length, device=aligned.device) < n_frames.to(aligned.device)[:, None]
    return torch.where(valid & found[:, None], aligned, -1)


def alignment_loss(log_probs: Tensor, n_frames: Tensor, tokens: Tensor, n_tokens: Tensor) -> Tensor:
    """Cross-entropy of the frames on the forced alignment, summed over the frames of a trial. (B, F, V) -> (B,)"""
    aligned = forced_alignment(log_probs, n_frames, tokens, n_tokens)
    own = -log_probs.float().gather(2, aligned.clamp(min=0)[..., None])[..., 0]
    return torch.where(aligned >= 0, own, 0.0).sum(1)
