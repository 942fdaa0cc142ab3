"""The factors of an ablation as given on the command line, and the arms that isolate each of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from arcuate.errors import UserError
from arcuate.recipe import Recipe, load_recipe
from arcuate.recipe_diff import ABOUT, diff

EXAMPLE = "eps:optimizer.eps=1e-8 or aug:augment.white_noise_sd=0.25,augment.offset_sd=0.05"
NAMED = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,39}):(?=[^=]*=)(.*)", re.DOTALL)
BASE, ALL, BUT = "base", "all", "all-but-"
SEEDS = ("train.seed", "data.seed")
TRIALS = ("data.sessions", "data.max_sessions", "data.n_sessions", "data.channels", "data.dev_fraction")
MAX_FACTORS = 12


@dataclass(frozen=True)
class Factor:
    """One change to a recipe, made of one or more settings that belong together."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """A recipe of the experiment: the baseline with some of the factors changed."""

    name: str
    changed: frozenset[str]

    def overrides(self, factors: Sequence[Factor]) -> list[str]:
        return [o for f in factors if f.name in self.changed for o in f.overrides]


@dataclass(frozen=True)
class Question:
    """A factor in one direction: what changes between two arms that differ in it alone."""

    factor: str
    direction: str  # "alone": from the baseline; "with the others": from the recipe with all changed
    before: str
    after: str


def read_factors(arguments: Sequence[str]) -> tuple[tuple[Factor, ...], tuple[str, ...]]:
    """Factors (`name:key=value,…`) and overrides that hold for every arm (`key=value`)."""
    factors: list[Factor] = []
    overrides: list[str] = []
    for argument in arguments:
        named = NAMED.fullmatch(argument)
        if named:
            factors.append(Factor(named[1], split_settings(named[2], argument)))
        elif "=" in argument:
            overrides.append(argument)
        else:
            raise UserError(f"{argument!r} is no factor; write it as name:key=value, such as {EXAMPLE}")
    refuse_names([f.name for f in factors])
    return tuple(factors), tuple(overrides)


def refuse_names(names: Sequence[str]) -> None:
    if not names:
        raise UserError(f"name at least one factor to vary, such as {EXAMPLE}")
    if len(names) > MAX_FACTORS:
        raise UserError(f"{len(names)} factors are too many for one experiment; at most {MAX_FACTORS}")
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the factor {name!r} is named twice; put its settings together with a comma")
        if name in (BASE, ALL) or name.startswith(BUT):
            raise UserError(f"{name!r} is the name of an arm; give the factor another")


def split_settings(text: str, argument: str) -> tuple[str, ...]:
    """`a.b=1,c={x: 1, y: 2}` at its commas, but not at those within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "{[":
            depth += 1
        elif sign in "}]":
            depth -= 1
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    if not all("=" in part for part in parts):
        raise UserError(f"factor {argument!r}: each part must be key=value, such as {EXAMPLE}")
    return tuple(part.strip() for part in parts)


def arms(factors: Sequence[Factor]) -> tuple[Arm, ...]:
    """The baseline, each factor changed alone, all changed with one put back, and all changed; each set once."""
    names = [f.name for f in factors]
    everything = frozenset(names)
    listed = [Arm(BASE, frozenset())]
    listed += [Arm(name, frozenset([name])) for name in names]
    listed += [Arm(f"{BUT}{name}", everything - {name}) for name in names]
    listed.append(Arm(ALL, everything))
    first: dict[frozenset[str], Arm] = {}
    for arm in listed:
        first.setdefault(arm.changed, arm)
    return tuple(first.values())


def questions(factors: Sequence[Factor]) -> tuple[Question, ...]:
    """What each factor does alone, and what it does once the others are changed too."""
    by_set = {arm.changed: arm.name for arm in arms(factors)}
    everything = frozenset(f.name for f in factors)
    asked: dict[tuple[str, str], Question] = {}
    for factor in factors:
        one = frozenset([factor.name])
        pairs = {"alone": (frozenset(), one), "with the others": (everything - one, everything)}
        for direction, (before, after) in pairs.items():
            question = Question(factor.name, direction, by_set[before], by_set[after])
            asked.setdefault((question.before, question.after), question)
    return tuple(asked.values())


def check_factors(recipe: str, overrides: Sequence[str], factors: Sequence[Factor]) -> Recipe:
    """The baseline; refuses factors that change nothing, the same as another, or what must stay the same."""
    base = load_recipe(recipe, overrides)
    owner: dict[str, str] = {}
    for factor in factors:
        changed = diff(base, load_recipe(recipe, [*overrides, *factor.overrides]))
        about = [o for o in factor.overrides if o.partition("=")[0].strip() in ABOUT]
        if about or not changed:
            raise UserError(
                f"the factor {factor.name} changes nothing: {', '.join(factor.overrides)} is what {recipe} has already"
            )
        for override in factor.overrides:
            refuse_setting(factor, override.partition("=")[0].strip(), owner)
    load_recipe(recipe, [*overrides, *(o for f in factors for o in f.overrides)])
    return base


def refuse_setting(factor: Factor, path: str, owner: dict[str, str]) -> None:
    if path in SEEDS:
        raise UserError(f"the factor {factor.name} sets {path}, which is varied by --seeds already")
    if path == "data" or path in TRIALS:
        raise UserError(
            f"the factor {factor.name} sets {path}: the arms would be scored on different trials, which cannot be"
            " compared; vary another setting"
        )
    for other, name in owner.items():
        if name != factor.name and (
            path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")
        ):
            raise UserError(f"the factors {name} and {factor.name} both set {path}; keep it in one of them")
    owner[path] = factor.name
