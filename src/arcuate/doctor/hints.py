"""What a log says about itself beside its numbers: data set, planned length, that it came to its end."""

import re
from typing import Any

from arcuate.doctor.collect import Collector, flatten

_25 = re.compile(r"t15[._]?20\d\d|t15[._ ]copytask|hdf5_data_final|b2t[_-]?25|brain-to-text-25|\bt15\b", re.I)
_24 = re.compile(
    r"t12[._]20\d\d|ptdecoder_ctc|competitiondata|b2t[_-]?24|brain-to-text-24|\bt12\b|willett", re.I
)
_PLAN = re.compile(
    r"(?:total[ _](?:batches|steps|iterations)|num[ _]training[ _](?:batches|steps)|n_?batch(?:es)?|max[ _]steps"
    r"|num[ _]train[ _]steps|training[ _]steps|planned[ _]steps)\W{1,4}(\d[\d,_]{1,11})\b",
    re.I,
)
_DONE = re.compile(
    r"training (?:is )?(?:complete|finished|done)|finished training|best avg val per achieved|total training time"
    r"|training completed|={3,} *(?:fin|end|done) *={3,}",
    re.I,
)
_RUN = re.compile(r"={2,} *(?:RUN|EXPERIMENT) +([^=\s][^=]{0,80}?) *={2,}", re.I)
_MARK = re.compile(r"train|best avg|=== *|finished|total|max.steps|num.train|n_?batch", re.I)
PLAN_KEYS = frozenset(
    {"nbatch", "nbatches", "n_batches", "num_training_batches", "max_steps", "total_batches", "total_steps"}
    | {"num_train_steps", "planned_steps", "steps", "max_iters", "n_steps"}
)
_MANY = 10_000


def look_at(line: str, collector: Collector, early: bool) -> bool:
    """Take note of a line that holds no numbers of the training itself; whether there was anything to note."""
    facts = collector.facts
    if not _MARK.search(line) and not early:
        return False
    done, named = _DONE.search(line), _RUN.search(line)
    if done:
        facts.setdefault("finished", []).append(collector.n_rows)
    if named:
        facts.setdefault("names", []).append((collector.n_rows, named[1].strip()))
    if "planned" not in facts and (plan := _PLAN.search(line)):
        _plan(facts, plan[1].replace(",", "").replace("_", ""), "the log names it")
    if early and "dataset" not in facts:
        name_dataset(line, collector, "the log names its files")
    return bool(done or named)


def name_dataset(text: str, collector: Collector, because: str) -> None:
    newer, older = _25.search(text), _24.search(text)
    if newer and not older:
        collector.facts.setdefault("dataset", ("b2t25", f"{because} ({newer[0]})"))
    elif older and not newer:
        collector.facts.setdefault("dataset", ("b2t24", f"{because} ({older[0]})"))


def look_at_config(config: Any, collector: Collector, because: str) -> None:
    """A configuration beside a history: its length and its data."""
    if not isinstance(config, dict):
        return
    flat = flatten(config)
    for name, value in flat.items():
        if name.rsplit("/", 1)[-1].lower() in PLAN_KEYS and "planned" not in collector.facts:
            _plan(collector.facts, value, because)
    texts = " ".join(v for v in flat.values() if isinstance(v, str))
    name_dataset(texts[:_MANY], collector, because)


def _plan(facts: dict[str, Any], value: Any, because: str) -> None:
    try:
        steps = int(value)
    except (TypeError, ValueError, OverflowError):
        return
    if 10 <= steps <= 100_000_000:
        facts["planned"] = (steps, because)
