"""The adapter: which model reads the next trial of a day, and what is learned from it once it was read.

    day = adapter.start("t15.2023.09.12")
    model = adapter.before(day, bins)              # bins only where the whole trial is there already
    ...                                            # model(...), or model.start(0, ...), step, finish
    day = adapter.after(day, Heard(bins, log_probs, tokens))

A trial is learned from only after it was read; before it, nothing but its own input may be used, and only
`statistics` does. `Day` is a value, so a day can be taken back to any earlier one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from arcuate.adapt.day import Day, Expected, Heard, Layer, Moments, Sums
from arcuate.adapt.safety import (
    compare,
    fall_back,
    gave_up,
    judged,
    must_fall_back,
    need,
    recorded,
    worth_learning,
)
from arcuate.adapt.settings import Adaptation
from arcuate.adapt.statistics import input_sums, matched
from arcuate.adapt.steps import entropy_gradients, label_gradients, move, read_copies, within
from arcuate.augment.settings import Augment
from arcuate.days import nearest_session
from arcuate.decode.greedy import greedy
from arcuate.errors import UserError
from arcuate.models.days import layer_of, one_day
from arcuate.models.model import Model
from arcuate.seeds import derive

Label = Callable[[np.ndarray], Sequence[int]]
STILL = Augment()  # no noise at all


@dataclass(frozen=True, eq=False)
class Adapter:
    """A model, a method, and the noise of the model's training. The model's weights are never changed."""

    model: Model
    settings: Adaptation
    noise: Augment
    label: Label = greedy  # frame scores to the tokens to learn from

    def start(self, session: str, reference: Sums | None = None, expected: Expected | None = None) -> Day:
        """A day begins: with its own layer where the model has one, else with that of the nearest known day.

        `reference` is what that known day's input looked like (`input_sums` of its trials), for `statistics`;
        `expected` is how sure the model is of trials of days it knows, without which every step is a whole one.
        """
        if self.settings.method == "statistics" and reference is None:
            raise UserError(
                "adapting by statistics needs recordings of the nearest known day to compare with; give a store"
                " that holds them, or choose another method"
            )
        like = self.start_like(session)
        layer = Layer(*layer_of(self.model, like))
        return Day(session, like, layer, layer, Moments.zero(layer), reference, expected)

    def start_like(self, session: str) -> str:
        """The known session whose layer a day begins with."""
        known = self.model.card.sessions
        return session if session in known else nearest_session(session, known)

    def before(self, day: Day, bins: Tensor | None = None) -> Model:
        """The model for the next trial, its session numbered 0; `bins` (T, C) are the trial's own, normalised."""
        layer = self.layer(day, bins)
        return one_day(self.model, day.session, layer.weight, layer.bias)

    def layer(self, day: Day, bins: Tensor | None = None) -> Layer:
        """The session layer that the next trial is read with: the one it began with where nothing calls for another."""
        safety = self.settings.safety
        if gave_up(day, safety) or need(day, safety) == 0.0:
            return day.start
        if self.settings.method != "statistics":
            return day.layer
        return self._matched(day, bins if self.settings.own_input else None)

    def unadapted(self, day: Day) -> Model:
        """The model as it would read this day had nothing been learned."""
        return one_day(self.model, day.session, day.start.weight, day.start.bias)

    def after(self, day: Day, heard: Heard, unadapted: np.ndarray | None = None) -> tuple[Day, str | None]:
        """The day after a trial was read, and why it fell back to the unadapted model if it did.

        `unadapted` are the frame scores (F, V) of the unadapted model, where the caller has them already.
        """
        safety = self.settings.safety
        day = replace(day, n_trials=day.n_trials + 1)
        if self.settings.method == "none" or gave_up(day, safety):
            return day, None
        if unadapted is None:
            unadapted = read(self.unadapted(day), heard.bins)
        day = judged(replace(day, trust=compare(day.trust, heard.log_probs, unadapted, safety)), unadapted)
        if reason := must_fall_back(day.trust, safety):
            return fall_back(day), reason
        if self.settings.method == "statistics":
            return self._count(day, heard), None
        if need(day, safety) == 0.0 or not worth_learning(heard, safety):
            return day, None
        return self._learn(day, heard), None

    def _count(self, day: Day, heard: Heard) -> Day:
        if not recorded(heard.bins):
            return day
        fresh = input_sums(self.model, heard.bins)
        return replace(day, seen=fresh if day.seen is None else day.seen + fresh, n_steps=day.n_steps + 1)

    def _learn(self, day: Day, heard: Heard) -> Day:
        settings = self.settings
        if settings.method == "entropy":
            outputs, of = read_copies(self.model, day.layer, [heard], STILL, settings.seed, 0)
            gradients = entropy_gradients(outputs, of)
        else:
            trials = [heard] * settings.copies
            if settings.method == "replay":
                day, past = self._recall(day)
                trials += past
                day = replace(day, memory=(*day.memory, heard)[-settings.memory :])
            outputs, of = read_copies(self.model, day.layer, trials, self.noise, settings.seed, day.n_trials)
            gradients = label_gradients(outputs, trials, of)
        rate = settings.rate * settings.safety.cool**day.trust.n_falls * need(day, settings.safety)
        gains = settings.method == "entropy"
        layer, moments = move(day.layer, day.moments, gradients, day.start, rate, settings.reach, gains)
        return replace(day, layer=layer, moments=moments, n_steps=day.n_steps + 1)

    def _recall(self, day: Day) -> tuple[Day, list[Heard]]:
        """Some past trials of the day, read anew: the model knows the day better than when it first heard them."""
        n = min(self.settings.past, len(day.memory))
        rng = np.random.default_rng(derive(self.settings.seed, day.session, day.n_trials))
        chosen = rng.choice(len(day.memory), size=n, replace=False).tolist() if n else []
        model = one_day(self.model, day.session, day.layer.weight, day.layer.bias)
        memory = list(day.memory)
        for i in chosen:
            log_probs = read(model, memory[i].bins)
            fresh = Heard(memory[i].bins, log_probs, tuple(self.label(log_probs)))
            if worth_learning(fresh, self.settings.safety):
                memory[i] = fresh
        return replace(day, memory=tuple(memory)), [memory[i] for i in chosen]

    def _matched(self, day: Day, bins: Tensor | None) -> Layer:
        assert day.reference is not None
        prior = self.settings.prior_bins / self.settings.safety.cool**day.trust.n_falls
        today = day.reference.counting_as(prior)
        if day.seen is not None:
            today = today + day.seen
        if bins is not None and recorded(bins):
            today = today + input_sums(self.model, bins)
        return within(matched(day.start, day.reference, today), day.start, self.settings.reach)


def make_adapter(model: Model, settings: Adaptation, noise: Augment, label: Label = greedy) -> Adapter:
    """An adapter for a model, which is put in reading mode: nothing but session layers is ever adapted."""
    return Adapter(model.eval().requires_grad_(False), settings, noise, label)


@torch.inference_mode()
def read(model: Model, bins: Tensor) -> np.ndarray:
    """Frame scores (F, V) of one trial of normalised bins (T, C), by a model of one day."""
    zero = torch.zeros(1, dtype=torch.int64, device=bins.device)
    outputs = model.encode(bins[None], zero + len(bins), zero)
    scores: np.ndarray = outputs.log_probs["ctc"][0, : int(outputs.n_frames[0])].float().cpu().numpy()
    return scores
