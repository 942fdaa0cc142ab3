"""Recipe: one experiment as data. Packaged YAML files, `extends`, overrides, and refusals that help."""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from arcuate.config import Settings, apply_override, explain, known_paths
from arcuate.data.config import Augment, Data
from arcuate.errors import UserError
from arcuate.losses.config import Loss
from arcuate.models.config import (
    Denoiser,
    Encoder,
    FrontEnd,
    GRUEncoder,
    ModelSettings,
    SpeakingMode,
    Transducer,
)
from arcuate.training.config import (
    Average,
    Constant,
    Ema,
    Guard,
    Optimizer,
    Runtime,
    Schedule,
    Stage,
    Train,
    Validate,
    fill_length,
    stage_problems,
    too_short,
)
from arcuate.training.tracking.config import Track


class OneOfEach(yaml.SafeLoader):
    """YAML in which a setting is given once: of two schedules, the first would vanish without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1 and key != "<<"]:
            raise ValueError(f"{twice[0]!r} is given twice; keep one of them")
        return super().construct_mapping(node, deep)


class Recipe(Settings):
    name: str = Field(min_length=1, max_length=100, description="left out: the name of the file")
    extends: str | None = Field(None, description="the recipe this one states its differences from")
    summary: str = Field("", description="one line for `arcuate recipes list`")
    notes: str = Field("", description="anything worth remembering")
    data: Data = Data()
    front_end: FrontEnd = FrontEnd()
    encoder: Encoder = GRUEncoder()
    transducer: Transducer = Transducer()
    mode: SpeakingMode = SpeakingMode()
    denoiser: Denoiser = Denoiser()
    output_init: Literal["default", "xavier"] = Field(
        "default", description="how the output layer starts; the '25 release uses xavier"
    )
    augment: Augment = Augment()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Constant(rate=1e-3)
    session_schedule: Schedule | None = Field(
        None, description="for the session layers; null = as `schedule`"
    )
    ema: Ema = Ema()
    average: Average = Average()
    guard: Guard = Guard()
    train: Train = Train()
    stages: tuple[Stage, ...] = ()
    validate_: Validate = Field(Validate(), alias="validate")
    runtime: Runtime = Runtime()
    track: Track = Track()

    @property
    def model(self) -> ModelSettings:
        return ModelSettings(
            front_end=self.front_end,
            encoder=self.encoder,
            transducer=self.transducer,
            mode=self.mode,
            denoiser=self.denoiser,
            output_init=self.output_init,
        )

    @property
    def components(self) -> tuple[str, ...]:
        """The parts of the model that stages can name."""
        asked = (self.transducer.enabled, self.mode.enabled, self.denoiser.enabled)
        more = zip(("transducer", "mode", "denoiser"), asked, strict=True)
        return ("front_end", "encoder", "ctc", *(name for name, enabled in more if enabled))

    @model_validator(mode="before")
    @classmethod
    def _as_long_as_its_stages(cls, tree: Any) -> Any:
        return fill_length(tree)

    @model_validator(mode="after")
    def _something_is_learnt(self) -> "Recipe":
        if self.loss.ctc.weight == 0 and not (self.transducer.enabled and self.loss.rnnt.weight > 0):
            raise ValueError(
                "all losses weigh 0, so nothing would be learnt; set loss.ctc.weight, or transducer.enabled"
                " with loss.rnnt.weight, above 0"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        if problems := list(contradictions(self)):
            raise ValueError("; ".join(problems))
        return self


def contradictions(recipe: Recipe) -> Iterator[str]:
    """Settings that are right on their own and wrong together, each with what to change."""
    steps, average, precision = recipe.train.steps, recipe.average, recipe.train.precision
    yield from stage_problems(recipe.stages, recipe.components)
    for name in ("schedule", "session_schedule"):
        yield from too_short(name, getattr(recipe, name), steps, recipe.stages)
    if average.start is not None and average.start > steps:
        yield (
            f"average.start {average.start} lies beyond train.steps {steps}, so that nothing would be averaged;"
            " lower average.start, raise train.steps, or set average.start=null"
        )
    if precision.kind == "fp16" and recipe.runtime.device in ("cpu", "mps"):
        yield (
            f"train.precision.kind=fp16 needs CUDA and runtime.device is {recipe.runtime.device};"
            " set train.precision.kind=fp32 or runtime.device=cuda"
        )
    if max(recipe.loss.intermediate.layers, default=0) >= (depth := recipe.encoder.depth):
        yield f"loss.intermediate.layers may name layers 1 to {depth - 1} of this encoder of {depth}"
    adaptive = recipe.guard.adaptive
    if adaptive.threshold is not None and adaptive.floor > recipe.schedule.peak:
        yield (
            f"guard.adaptive.floor {adaptive.floor:g} lies above the highest rate {recipe.schedule.peak:g} of the"
            " schedule; lower guard.adaptive.floor or raise the rate"
        )


def recipe_names() -> list[str]:
    folder = files("arcuate") / "experiments" / "recipes"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A packaged recipe by name, or a YAML file by path, with `key.sub=value` overrides applied."""
    tree = resolve(name)
    for override in overrides:
        apply_override(tree, override)
    return parse_recipe(tree, name)


def parse_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(dict.fromkeys(explain(error, where, Recipe)))) from None


def resolve(name: str) -> dict[str, Any]:
    """The recipe as a tree of plain values, its ancestors merged in.

    `extends` of the whole names a packaged recipe or none, so that a run's recipe does not need files elsewhere.
    """
    chain = lineage(name)
    tree: dict[str, Any] = {}
    for _, own in reversed(chain):
        tree = merge(tree, own)
    packaged = [place.name for place, _ in chain[1:] if place.path is None]
    return {**tree, "extends": packaged[0] if packaged else None}


@dataclass(frozen=True)
class Place:
    """Where a recipe stands: packaged under its name, or in a file."""

    name: str
    path: Path | None = None


def lineage(name: str) -> list[tuple[Place, dict[str, Any]]]:
    """The recipe, its parent and so on up to the one that extends nothing; each with what it states itself."""
    chain: list[tuple[Place, dict[str, Any]]] = []
    place = locate(name)
    while True:
        if place in (seen := [earlier for earlier, _ in chain]):
            names = " -> ".join(earlier.name for earlier in (*seen, place))
            raise UserError(f"recipe {name!r} extends itself: {names}")
        tree = read_tree(place)
        chain.append((place, tree))
        parent = tree.get("extends")
        if parent is None:
            return chain
        place = locate(str(parent), place)


def locate(name: str, by: Place | None = None) -> Place:
    """A recipe by name or path; what a recipe file extends is looked for in its own folder first."""
    if by is None:
        if name in recipe_names():
            return Place(name)
        for path in (Path(name), Path(name) / "recipe.yaml"):  # a file, or a run folder
            if os.path.isfile(path):
                return Place(name, path.resolve())
    else:
        if by.path is not None and os.path.isfile(path := by.path.parent / name):
            return Place(name, path.resolve())
        if name in recipe_names():
            return Place(name)
    raise UserError(unknown_recipe(name, by))


def read_tree(place: Place) -> dict[str, Any]:
    """What a recipe states itself."""
    if place.path is None:
        text = (files("arcuate") / "experiments" / "recipes" / f"{place.name}.yaml").read_text("utf-8")
    else:
        try:
            text = place.path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {place.name} cannot be read as text: {error}") from None
    try:
        tree = yaml.load(text, OneOfEach)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"recipe {place.name} is no valid YAML: {first}") from None
    if not isinstance(tree, dict):
        raise UserError(f"recipe {place.name} must be a mapping of settings, such as 'train: {{steps: 100}}'")
    return {"name": place.path.stem if place.path else place.name, **tree}


def unknown_recipe(name: str, by: Place | None) -> str:
    known = recipe_names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known recipes: {', '.join(known)}"
    where = f" (named by 'extends' in {by.name}, and looked for beside it)" if by else ""
    return f"there is no recipe {name!r}{where}, nor a file of that name; {hint}"


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`, mapping by mapping; another `kind` replaces a component instead of mixing with it."""
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            other_kind = "kind" in value and value["kind"] != old.get("kind")
            out[key] = dict(value) if other_kind else merge(old, value)
        else:
            out[key] = value
    return out


def setting_for(option: str) -> str | None:
    """The setting that someone means who writes --steps or --log-every."""
    word = option.lstrip("-").replace("-", "_")
    if not word:
        return None
    known = sorted(known_paths(Recipe), key=lambda path: (path.partition(".")[0] != "train", path))
    leaves = [path.rpartition(".")[2] for path in known]
    close = difflib.get_close_matches(word, leaves, n=1, cutoff=0.75)
    return known[leaves.index(close[0])] if close else None


def to_tree(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe, complete, as plain values."""
    return recipe.model_dump(mode="json", by_alias=True)


def to_yaml(recipe: Recipe) -> str:
    return yaml.safe_dump(to_tree(recipe), sort_keys=False, allow_unicode=True, width=100)
