"""Model cards: MODEL_CARD.md with the metadata block (front matter) that Hugging Face reads.

A card lists data with content hashes, error rates with intervals, intended use and limits; `card.md.jinja` is its text.
It is a function of the run folder: `arcuate export RUN FILE.md` writes it, other exports contain it. A card that lies
in the run folder belongs to the user: exports and uploads take it as it is.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader

from arcuate.config import parse_yaml
from arcuate.data.alphabet import error_rate_name, token_unit
from arcuate.data.releases import RELEASES
from arcuate.errors import UserError, escape_controls
from arcuate.evaluation.cite import cite
from arcuate.exported.file import CARD, is_export, open_archive
from arcuate.files import Result, finite_number, read_json, write_text
from arcuate.progress import counted, percent
from arcuate.run import WORDS_LABEL, Run, RunLike, find_checkpoint, open_run, split_parent, unfinished_reason

UNKNOWN_LICENCE = "unknown"  # Hugging Face's identifier for a licence that is not stated
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,59}")
_MAX_CARD_BYTES = 2_000_000
_TASK = {"type": "automatic-speech-recognition", "name": "Brain-to-text (intracortical recordings)"}


@dataclass(frozen=True)
class CardResult(Result):
    """What `write_card` wrote."""

    path: Path
    licence: str
    simulated: bool
    n_results: int

    def summary(self) -> str:
        missing = " (state one with --license)" if self.licence == UNKNOWN_LICENCE else ""
        data = "simulated data, " if self.simulated else ""
        return f"{self.path}: {data}{counted(self.n_results, 'result')}, licence {self.licence}{missing}"


@dataclass(frozen=True)
class _Result:
    """One row of the results: an error rate with its interval, and how it was measured."""

    split: str
    label: str
    metric: str
    rate: float
    low: float | None
    high: float | None
    n_trials: int | None
    method: str
    checkpoint: str
    note: str = ""
    data_hash: str | None = None

    @property
    def interval(self) -> str:
        return "–" if self.low is None or self.high is None else f"{percent(self.low)} to {percent(self.high)}"

    def to_metadata(self) -> dict[str, Any]:
        """The entry of the model index."""
        args: dict[str, Any] = {"method": self.method, "n_trials": self.n_trials}
        if self.low is not None and self.high is not None:
            args["interval_95"] = [round(100 * self.low, 3), round(100 * self.high, 3)]
        args |= {"note": self.note} if self.note else {}
        name = f"{self.metric}, % (95 % interval {self.interval})"
        return {"type": self.metric.lower(), "value": round(100 * self.rate, 3), "name": name, "args": args}


def write_card(source: RunLike, out: str | Path, *, licence: str | None = None) -> CardResult:
    """Write the card of a run, RUN@CHECKPOINT or model folder as a new Markdown file, or that in an exported model.

    `licence` is an identifier of Hugging Face, such as cc-by-4.0; by default unknown.
    """
    path = Path(out)
    if path.exists():
        raise UserError(f"{path} exists; edit it, remove it or choose another name")
    if (text := exported_card(source)) is None:
        named, checkpoint = split_parent(os.fspath(source))
        text = describe_run(open_run(named), checkpoint, licence)
    write_text(path, text)
    metadata = card_metadata(text, "the card")
    n_results = sum(len(result["metrics"]) for result in metadata.get("model-index", [{}])[0].get("results", []))
    return CardResult(path, metadata["license"], "simulated-data" in metadata["tags"], n_results)


def run_card(run: Run, checkpoint: str = "best", licence: str | None = None, address: str = "PATH") -> str:
    """The card for an export or an upload: that of the run folder if there is one, else the text of `describe_run`."""
    if not run.card_file.exists():
        return describe_run(run, checkpoint, licence, address)
    text = read_card(run.card_file)
    stated = card_metadata(text, str(run.card_file)).get("license")
    if licence is not None and licence != stated:
        raise UserError(
            f"{run.card_file} states the licence {stated!r:.60}; correct it, or leave out --license {licence}"
        )
    return text


def describe_run(run: Run, checkpoint: str = "best", licence: str | None = None, address: str = "PATH") -> str:
    """The card of a run; the metadata list the results of this checkpoint, the text lists all.

    `address` is used in the code example.
    """
    if licence is not None and not _LICENCE.fullmatch(licence):
        raise UserError(
            f"--license {licence!r:.60} is not an identifier of Hugging Face, such as cc-by-4.0, mit or other"
        )
    folder = find_checkpoint(run, checkpoint)
    model = read_json(folder / "model.json")
    classes = _classes(model, folder)
    environment = run.environment() if run.environment_file.is_file() else {}
    data, settings = _mapping(environment.get("data")), _mapping(model.get("settings"))
    sessions = model.get("sessions")
    recipe = run.recipe_tree() if run.recipe_file.is_file() else {}
    rate_name = error_rate_name(classes)
    results = [*_read_results(run, rate_name), *_read_calibration(run, rate_name, folder.name)]
    reported = [row for row in run.metrics() if row.get("split") != "train" and _rate(row.get("per")) is not None]
    values = {
        "name": run.name,
        "model": model,
        "encoder": _mapping(settings.get("encoder")),
        "session_layers": _mapping(_mapping(settings.get("front_end")).get("session_layer")).get("enabled"),
        "sessions": sessions if isinstance(sessions, list) else [],
        "unit": token_unit(classes),
        "environment": environment,
        "n_parameters": environment.get("n_parameters"),
        "data": data,
        "hashes": _mapping(data.get("hashes")),
        "simulated": data.get("simulated") is True,
        "dataset": _dataset(data),
        "recipe": {**recipe, "train": _mapping(recipe.get("train"))} if recipe else {},
        "checkpoint": folder.name,
        "unfinished": unfinished_reason(run) if recipe else None,
        "results": results,
        "lowest": min(reported, key=lambda row: float(row["per"]), default=None),
        "rate_name": rate_name,
        "references": _references(run),
        "address": address,
    }
    state = read_json(folder / "state.json") if (folder / "state.json").is_file() else {}
    step = state.get("step")
    names = {folder.name} | ({f"step-{step:08d}"} if isinstance(step, int) else set())
    own = [r for r in results if r.checkpoint in names and not r.label]
    block = yaml.safe_dump(
        _metadata(values, own, licence or UNKNOWN_LICENCE), sort_keys=False, allow_unicode=True, width=100
    )
    page = Environment(
        loader=PackageLoader("arcuate.evaluation", "."), trim_blocks=True, lstrip_blocks=True, finalize=_plain
    )
    page.filters["percent"] = percent
    page.tests["search"] = lambda text, words: words in text
    return f"---\n{block}---\n\n{page.get_template('card.md.jinja').render(values)}\n"


def _classes(model: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    classes = model.get("classes")
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes) or len(classes) < 2:
        raise UserError(f"{folder / 'model.json'} is damaged: it lists no classes; restore the file")
    return tuple(classes)


def _metadata(values: Mapping[str, Any], results: Sequence[_Result], licence: str) -> dict[str, Any]:
    """The metadata block, with the results of one checkpoint."""
    dataset, name = values["dataset"]
    tags = [
        "brain-computer-interface",
        "intracortical",
        "speech",
        "brain-to-text",
        _plain(values["encoder"].get("kind")),
    ]
    metadata: dict[str, Any] = {
        "library_name": "arcuate",
        "license": licence,
        "language": "en",
        "tags": [*tags, *(["simulated-data"] if values["simulated"] else [])],
        **({"datasets": [dataset]} if values["data"] else {}),
        "metrics": sorted({r.metric.lower() for r in results}) or [values["rate_name"].lower()],
    }
    entries = []
    for split in dict.fromkeys(r.split for r in results):
        chosen = [r for r in results if r.split == split]
        revision = next((r.data_hash for r in chosen if r.data_hash), None)
        described = {"type": dataset, "name": name, "split": _plain(split)}
        described |= {"revision": revision} if revision else {}
        metrics = [r.to_metadata() for r in chosen]
        entries.append({"task": dict(_TASK), "dataset": described, "metrics": metrics})
    if entries:
        metadata["model-index"] = [{"name": _plain(values["name"]), "results": entries}]
    return metadata


def _dataset(data: Mapping[str, Any]) -> tuple[str, str]:
    """Identifier and name of the training data."""
    layout = _plain(data.get("layout") or "")
    if data.get("simulated") is True:
        return f"simulated-{layout}", f"simulated recordings in the layout {layout}"
    if release := RELEASES.get(layout):
        return release.identifier, release.name
    return (layout, f"recordings of layout {layout}") if layout else ("unknown", "not recorded")


def _read_results(run: Run, rate_name: str) -> Iterator[_Result]:
    """Error rates of results/<split>[.<label>].json."""
    for file in sorted((run.path / "results").glob("*.json")):
        values = read_json(file)
        split, _, label = file.stem.partition(".")
        of_words = label == WORDS_LABEL
        for metric in ("wer", "cer") if of_words else ("per",):
            rate, low, high = (_rate(values.get(key)) for key in (metric, f"{metric}_low", f"{metric}_high"))
            if rate is None:
                continue
            n_trials, data_hash = values.get("n_scored"), values.get("data_hash")
            yield _Result(
                split,
                "" if of_words else label,
                rate_name if metric == "per" else metric.upper(),
                rate,
                low,
                high,
                n_trials if isinstance(n_trials, int) else None,
                f"words, language model {Path(str(values.get('lm'))).name}"
                if of_words
                else f"{values.get('search')} search",
                str(values.get("checkpoint") or "–"),
                _note(split, values),
                data_hash if isinstance(data_hash, str) else None,
            )


def _read_calibration(run: Run, rate_name: str, checkpoint: str) -> Iterator[_Result]:
    """Error rate of a calibrated run on the sentences after those of its calibration."""
    values = read_json(run.calibration_file) if run.calibration_file.is_file() else {}
    curve = values.get("curve")
    last = _mapping(curve[-1]) if isinstance(curve, list) and curve else {}
    rate, low, high = (_rate(last.get(key)) for key in ("per", "low", "high"))
    if rate is not None:
        n_trials, n_sentences = last.get("n_trials"), int(_rate(last.get("sentences")) or 0)
        method = f"greedy search, calibrated with {counted(n_sentences, 'sentence')}"
        split, n = f"held-out sentences of {values.get('session')}", n_trials if isinstance(n_trials, int) else None
        yield _Result(split, "", rate_name, rate, low, high, n, method, checkpoint)


def _note(split: str, values: Mapping[str, Any]) -> str:
    if split == "train":
        return "training data"
    notes = ["selected on this split"] if values.get("selected_on") == split else []
    notes += ["other data than in training"] if values.get("data_differ_in") else []
    notes += ["weights tuned on these trials"] if values.get("tuned_on_these") else []
    return ", ".join(notes)


def _references(run: Run) -> list[str]:
    """References of data and methods; a run whose components may not be imported has none."""
    if not (run.recipe_file.is_file() and run.environment_file.is_file()):
        return []
    try:
        return [r.reference for r in cite(run).references]
    except UserError as error:
        return [f"Not listed: {error}"]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _rate(value: Any) -> float | None:
    rate = finite_number(value)
    return rate if rate is not None and 0 <= rate < 1e6 else None


def _plain(value: Any) -> str:
    """A value from a file as one line of Markdown text: no markup, no control characters, at most 500 characters."""
    text = escape_controls(" ".join(str(value).split()))[:500]
    return re.sub(r"([|`<>\[\]\\*])", r"\\\1", text)


# --- cards in files --------------------------------------------------------------------------------------------


def read_card(path: Path) -> str:
    """The text of a card; UserError if it is too long or not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CARD_BYTES + 1)
        if len(content) > _MAX_CARD_BYTES:
            raise UserError(f"{path} has more than {_MAX_CARD_BYTES:,} bytes; shorten or remove it")
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; correct or remove it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def card_metadata(text: str, where: str) -> dict[str, Any]:
    """The metadata block of a card; empty if it has none."""
    found = re.match(r"---\r?\n(.*?)\r?\n---[ \t]*(\r?\n|\Z)", text, re.DOTALL)
    if found is None:
        return {}
    try:
        metadata = parse_yaml(found.group(1))
    except ValueError as error:
        raise UserError(f"the metadata of {where} are not valid YAML: {error}; correct or remove them") from None
    if not isinstance(metadata, dict):
        raise UserError(f"the metadata of {where} must be a mapping of names to values; correct or remove them")
    return metadata


def exported_card(path: RunLike) -> str | None:
    """The card in an exported model; None if the path names a run."""
    if not is_export(path := Path(path)):
        return None
    archive = open_archive(path)
    if CARD not in archive:
        raise UserError(f"{path} contains no model card, because an earlier version wrote it; export the run again")
    try:
        return archive.bytes(CARD, _MAX_CARD_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"the model card in {path} is not UTF-8 text; export the run again") from None
