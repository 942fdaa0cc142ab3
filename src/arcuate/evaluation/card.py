"""Model cards: MODEL_CARD.md of a run, with the metadata block (front matter) that Hugging Face reads.

A card lists data with content hashes, error rates with intervals, intended use and limits. It is a function of the
run folder: written at the end of training, after every evaluation and by `arcuate card`, and part of every export. What
a user writes below the last line of the generated part, and the licence, are kept when it is written again.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from arcuate.config import parse_yaml
from arcuate.data.alphabet import BLANK_NAMES, error_rate_name, token_unit
from arcuate.data.releases import RELEASES
from arcuate.errors import UserError, escape_controls
from arcuate.evaluation.cite import cite
from arcuate.exported.file import CARD, is_export, open_archive
from arcuate.files import fields_to_dict, read_json, write_text
from arcuate.progress import counted, logger, percent
from arcuate.run import WORDS_LABEL, Run, RunLike, find_checkpoint, has_checkpoint, open_run, unfinished_reason

UNKNOWN_LICENCE = "unknown"  # Hugging Face's identifier for a licence that is not stated
OWN_TEXT = "<!-- Generated up to this line; text below it is kept when the card is written again. -->"
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]{0,59}")
_MAX_CARD_BYTES = 2_000_000
_TASK = {"type": "automatic-speech-recognition", "name": "Brain-to-text (intracortical recordings)"}
_INTENDED_USE = """\
Research on speech neuroprostheses: decoding recordings of the same participant and electrode arrays that the model was
trained on, comparison of methods, and as a starting point for calibration on later sessions. It is not a medical
device. It is not meant for decoding a person without their consent, or where a wrong word can do harm and is not
checked."""


@dataclass(frozen=True)
class ModelCard:
    """A model card: its metadata block and its text."""

    name: str
    metadata: dict[str, Any]
    text: str  # Markdown after the metadata block, up to the part of the user
    own_text: str = ""  # of the user

    def markdown(self) -> str:
        block = yaml.safe_dump(self.metadata, sort_keys=False, allow_unicode=True, width=100)
        return f"---\n{block}---\n\n{self.text}\n{OWN_TEXT}\n{self.own_text}"


@dataclass(frozen=True)
class CardResult:
    """What `write_card` wrote."""

    path: Path
    licence: str
    simulated: bool
    n_results: int

    def summary(self) -> str:
        missing = " (state one with --license)" if self.licence == UNKNOWN_LICENCE else ""
        data = "simulated data, " if self.simulated else ""
        return f"{self.path}: {data}{counted(self.n_results, 'result')}, licence {self.licence}{missing}"

    def to_dict(self) -> dict[str, Any]:
        return fields_to_dict(self)


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
    caveat: str
    data_hash: str | None

    @property
    def interval(self) -> str:
        return "–" if self.low is None or self.high is None else f"{percent(self.low)} to {percent(self.high)}"


def write_card(run: RunLike, *, licence: str | None = None, force: bool = False) -> CardResult:
    """Write MODEL_CARD.md into a run folder or the folder of an imported model.

    `licence` is an identifier of Hugging Face, such as cc-by-4.0; by default that of the existing card, else unknown.
    `force` replaces a card that arcuate did not write.
    """
    opened = open_run(run)
    if not force and _is_foreign(opened.card_file):
        raise UserError(
            f"{opened.card_file} was not written by arcuate, or its last generated line was removed; add --force to"
            " replace it"
        )
    card = describe_run(opened, licence=licence)
    write_text(opened.card_file, card.markdown())
    results = card.metadata.get("model-index", [{}])[0].get("results", [])
    n_results = sum(len(result["metrics"]) for result in results)
    return CardResult(opened.card_file, card.metadata["license"], "simulated-data" in card.metadata["tags"], n_results)


def refresh_card(run: Run, name: str | None = None) -> None:
    """Write the card after training or evaluation; if another file of the run is damaged, only log a warning.

    A run that was interrupted before its first checkpoint gets no card. `name` is the name of the model, if the folder
    has a temporary one.
    """
    if not has_checkpoint(run):
        return
    try:
        if _is_foreign(run.card_file):
            logger.info(f"{run.card_file} was not written by arcuate and is left as it is")
            return
        text = describe_run(run, name=name).markdown()
    except UserError as error:
        logger.warning(f"the model card was not written: {error}; write it with: arcuate card {run.path}")
        return
    write_text(run.card_file, text)


def describe_run(
    run: Run, checkpoint: str = "best", licence: str | None = None, address: str = "PATH", name: str | None = None
) -> ModelCard:
    """The card of a run; the metadata list the results of this checkpoint, the text lists all.

    `address` is used in the code example; `name` is by default that of the folder.
    """
    if licence is not None and not _LICENCE.fullmatch(licence):
        raise UserError(
            f"--license {licence!r:.60} is not an identifier of Hugging Face, such as cc-by-4.0, mit or other"
        )
    folder = find_checkpoint(run, checkpoint)
    model = read_json(folder / "model.json")
    environment = run.environment() if run.environment_file.is_file() else {}
    data = environment.get("data")
    data = data if isinstance(data, dict) else {}
    facts = _Facts(_plain(name or run.name), run, folder, model, environment, data)
    kept_licence, own_text = _read_own_parts(run.card_file)
    results = [*_read_results(facts), *_read_calibration(facts)]
    chosen = licence or kept_licence or UNKNOWN_LICENCE
    return ModelCard(facts.name, _metadata(facts, results, chosen), _text(facts, results, address), own_text)


# --- facts of a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Facts:
    """Files of a run as plain values: no component of the model is imported to describe it."""

    name: str
    run: Run
    checkpoint: Path
    model: Mapping[str, Any]
    environment: Mapping[str, Any]
    data: Mapping[str, Any]

    @property
    def checkpoint_names(self) -> set[str]:
        """Name of the checkpoint in results: that of its folder and, where it is not in a run, that of its step."""
        state = self.checkpoint / "state.json"
        step = read_json(state).get("step") if state.is_file() else None
        return {_plain(self.checkpoint.name)} | ({f"step-{step:08d}"} if isinstance(step, int) else set())

    @property
    def classes(self) -> tuple[str, ...]:
        classes = self.model.get("classes")
        if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes) or len(classes) < 2:
            raise UserError(f"{self.checkpoint / 'model.json'} is damaged: it lists no classes; restore the file")
        return tuple(classes)

    @property
    def sessions(self) -> tuple[str, ...]:
        sessions = self.model.get("sessions")
        return tuple(map(_plain, sessions)) if isinstance(sessions, list) else ()

    @property
    def settings(self) -> Mapping[str, Any]:
        return _mapping(self.model.get("settings"))

    @property
    def encoder(self) -> Mapping[str, Any]:
        return _mapping(self.settings.get("encoder"))

    @property
    def recipe(self) -> Mapping[str, Any]:
        return self.run.recipe_tree() if self.run.recipe_file.is_file() else {}

    @property
    def is_simulated(self) -> bool:
        return self.data.get("simulated") is True

    @property
    def dataset(self) -> tuple[str, str]:
        """Identifier and name of the training data."""
        layout = _plain(self.data.get("layout") or "")
        if self.is_simulated:
            return f"simulated-{layout}", f"simulated recordings in the layout {layout}"
        if not layout:
            return "unknown", "not recorded"
        if release := RELEASES.get(layout):
            return release.identifier, release.name
        return layout, f"recordings of layout {layout}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _plain(value: Any) -> str:
    """A name from a file as one line of Markdown text: no markup, no control characters, at most 200 characters."""
    text = escape_controls(" ".join(str(value).split()))[:200]
    return re.sub(r"([|`<>\[\]\\*])", r"\\\1", text)


def _read_results(facts: _Facts) -> Iterator[_Result]:
    """Error rates of results/<split>[.<label>].json."""
    rate_name = error_rate_name(facts.classes)
    for file in sorted((facts.run.path / "results").glob("*.json")):
        values = read_json(file)
        split, _, label = file.stem.partition(".")
        for metric in ("wer", "cer") if label == WORDS_LABEL else ("per",):
            rate, low, high = (_rate(values.get(key)) for key in (metric, f"{metric}_low", f"{metric}_high"))
            if rate is None:
                continue
            n_trials, lm, search = values.get("n_scored"), values.get("lm"), values.get("search")
            adapt = _mapping(values.get("adapt")).get("method")
            method = (
                f"words, language model {_plain(Path(str(lm)).name)}" if label == WORDS_LABEL else f"{search} search"
            )
            yield _Result(
                split=_plain(split),
                label="" if label == WORDS_LABEL else _plain(label),
                metric=rate_name if metric == "per" else metric.upper(),
                rate=rate,
                low=low,
                high=high,
                n_trials=n_trials if isinstance(n_trials, int) else None,
                method=_plain(method) + (f", adaptation {_plain(adapt)}" if adapt else ""),
                checkpoint=_plain(values.get("checkpoint") or "–"),
                caveat=_caveat(split, values),
                data_hash=values["data_hash"] if isinstance(values.get("data_hash"), str) else None,
            )


def _read_calibration(facts: _Facts) -> Iterator[_Result]:
    """Error rate of a calibrated run on the sentences after those of its calibration."""
    if not facts.run.calibration_file.is_file():
        return
    values = read_json(facts.run.calibration_file)
    curve = values.get("curve")
    last = _mapping(curve[-1]) if isinstance(curve, list) and curve else {}
    rate, low, high = (_rate(last.get(key)) for key in ("per", "low", "high"))
    if rate is not None:
        n_trials, session = last.get("n_trials"), _plain(values.get("session"))
        yield _Result(
            split=f"held-out sentences of {session}",
            label="",
            metric=error_rate_name(facts.classes),
            rate=rate,
            low=low,
            high=high,
            n_trials=n_trials if isinstance(n_trials, int) else None,
            method=f"greedy search, calibrated with {counted(int(_rate(last.get('sentences')) or 0), 'sentence')}",
            checkpoint=_plain(facts.checkpoint.name),
            caveat="",
            data_hash=None,
        )


def _rate(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e6 else None


def _caveat(split: str, values: Mapping[str, Any]) -> str:
    if split == "train":
        return "training data"
    notes = ["selected on this split"] if values.get("selected_on") == split else []
    notes += ["other data than in training"] if values.get("data_differ_in") else []
    notes += ["weights tuned on these trials"] if values.get("tuned_on_these") else []
    return ", ".join(notes)


# --- metadata block ------------------------------------------------------------------------------------------


def _metadata(facts: _Facts, results: Sequence[_Result], licence: str) -> dict[str, Any]:
    dataset, name = facts.dataset
    own = [r for r in results if r.checkpoint in facts.checkpoint_names and not r.label]
    tags = ["brain-computer-interface", "intracortical", "speech", "brain-to-text", _plain(facts.encoder.get("kind"))]
    metadata: dict[str, Any] = {
        "library_name": "arcuate",
        "license": licence,
        "language": "en",
        "tags": [*tags, *(["simulated-data"] if facts.is_simulated else [])],
        **({"datasets": [dataset]} if facts.data else {}),
        "metrics": sorted({r.metric.lower() for r in own}) or [error_rate_name(facts.classes).lower()],
    }
    entries = []
    for split in dict.fromkeys(r.split for r in own):
        metrics = [_metric(r) for r in own if r.split == split]
        revision = next((r.data_hash for r in own if r.split == split and r.data_hash), None)
        described = {"type": dataset, "name": name, "split": split}
        described |= {"revision": revision} if revision else {}
        entries.append({"task": dict(_TASK), "dataset": described, "metrics": metrics})
    if entries:
        metadata["model-index"] = [{"name": facts.name, "results": entries}]
    return metadata


def _metric(result: _Result) -> dict[str, Any]:
    args: dict[str, Any] = {"method": result.method, "n_trials": result.n_trials}
    if result.low is not None and result.high is not None:
        args["interval_95"] = [round(100 * result.low, 3), round(100 * result.high, 3)]
    args |= {"note": result.caveat} if result.caveat else {}
    name = f"{result.metric}, % (95 % interval {result.interval})"
    return {"type": result.metric.lower(), "value": round(100 * result.rate, 3), "name": name, "args": args}


# --- text ------------------------------------------------------------------------------------------------------


def _text(facts: _Facts, results: Sequence[_Result], address: str) -> str:
    parts = [f"# {facts.name}"]
    if facts.is_simulated:
        parts.append(
            "> **Simulated data.** This model was trained and evaluated on simulated recordings. Its error rates are"
            " not those of a person, and it cannot decode real recordings."
        )
    parts += [_description(facts), "## Results", _results_table(facts, results), "## Data", _data_table(facts)]
    parts += ["## Training", _training(facts), "## Intended use", _INTENDED_USE, "## Limits", _limits(facts, results)]
    parts += ["## Use", _usage(facts, address)]
    if references := _references(facts.run):
        parts += ["## References", references]
    return "\n\n".join(parts) + "\n"


def _description(facts: _Facts) -> str:
    size = facts.environment.get("n_parameters")
    parameters = f" with {size:,} parameters" if isinstance(size, int) else ""
    return (
        f"{_plain(facts.encoder.get('kind')).upper()} model{parameters} that maps intracortical recordings of attempted"
        f" speech or writing ({facts.model.get('n_channels')} features per 20-ms bin) to {token_unit(facts.classes)}s,"
        " trained with [Arcuate](https://github.com/arcuate-bci/arcuate)."
    )


def _results_table(facts: _Facts, results: Sequence[_Result]) -> str:
    if not results:
        reported = [
            row for row in facts.run.metrics() if row.get("split") != "train" and _rate(row.get("per")) is not None
        ]
        if not reported:
            return "Not evaluated yet. `arcuate evaluate` adds error rates with intervals."
        best = min(reported, key=lambda row: float(row["per"]))
        rate, split = percent(float(best["per"])), _plain(best.get("split"))
        return (
            f"Not evaluated yet. Lowest {error_rate_name(facts.classes)} during training: {rate} on {split} at step"
            f" {best.get('step')}, without interval; checkpoints were selected on these trials."
        )
    rows = [
        "| split | error rate | 95 % interval | trials | method | checkpoint | note |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        split = f"{r.split} ({r.label})" if r.label else r.split
        n_trials = "–" if r.n_trials is None else f"{r.n_trials:,}"
        cells = (split, f"{r.metric} {percent(r.rate)}", r.interval, n_trials, r.method, r.checkpoint, r.caveat or "–")
        rows.append(f"| {' | '.join(cells)} |")
    return (
        "\n".join(rows) + "\n\nIntervals: bootstrap over trials. They do not cover other training seeds or other days."
    )


def _data_table(facts: _Facts) -> str:
    sessions = facts.sessions
    listed = f"{len(sessions)}: {sessions[0]} to {sessions[-1]}" if sessions else "none"
    rows = [("data", facts.dataset[1]), ("simulated", "yes" if facts.is_simulated else "no"), ("sessions", listed)]
    if "simulated" not in facts.data:
        rows[1] = ("simulated", "not recorded")
    rows += [("features per bin", str(facts.model.get("n_channels"))), ("classes", str(len(facts.classes)))]
    if facts.data.get("features"):
        rows.append(("features", _plain(facts.data["features"])))
    hashes = facts.data.get("hashes")
    rows += [(f"content hash, {_plain(split)}", f"`{_plain(value)}`") for split, value in _mapping(hashes).items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _training(facts: _Facts) -> str:
    if not facts.recipe:
        return "Imported model; see the publication it comes from."
    train = _mapping(facts.recipe.get("train"))
    versions = ", ".join(
        f"{k} {_plain(facts.environment[k])}" for k in ("arcuate", "torch") if facts.environment.get(k)
    )
    lines = [
        f"Recipe {_plain(facts.recipe.get('name'))}, {train.get('steps')} steps, seed {train.get('seed')},"
        f" precision {_plain(facts.environment.get('precision') or 'fp32')}; {versions}.",
        "All settings are in recipe.yaml.",
        f"Checkpoint {_plain(facts.checkpoint.name)}, selected on the split"
        f" {_plain(facts.environment.get('selected_on') or 'not recorded')}.",
    ]
    if reason := unfinished_reason(facts.run):
        lines.append(f"Training is not complete: {_plain(reason)}.")
    return "\n".join(lines)


def _limits(facts: _Facts, results: Sequence[_Result]) -> str:
    front_end = _mapping(facts.settings.get("front_end"))
    limits = [
        "The model is specific to the implants it was trained on and does not decode recordings of other participants."
    ]
    if _mapping(front_end.get("session_layer")).get("enabled"):
        limits.append(
            "Every session has an input layer of its own. Later sessions need calibration or adaptation"
            " (`arcuate calibrate`, `arcuate evaluate --adapt`), and error rates rise with the days between them."
        )
    if facts.encoder.get("bidirectional"):
        limits.append("The encoder is bidirectional: it needs complete trials and cannot decode a stream.")
    if not any(r.metric == "WER" for r in results):
        limits.append("Word error rates were not measured; they depend on the lexicon and the language model.")
    if any("selected on" in r.caveat for r in results):
        limits.append("Error rates on the split that checkpoints were selected on are optimistic.")
    if len([c for c in facts.classes if c not in BLANK_NAMES]) == 40:
        limits.append("Its classes are the phonemes of American English.")
    limits.append("It outputs text for any input, even for bins without attempted speech.")
    return "\n".join(f"- {limit}" for limit in limits)


def _usage(facts: _Facts, address: str) -> str:
    note = "" if address.startswith("hf:") else "  # run folder, or hf:ORG/NAME@REVISION"
    session = facts.sessions[-1] if facts.sessions else "SESSION"
    return (
        f'```python\nimport arcuate\n\ndecoder = arcuate.load("{address}"){note}\n'
        f'hypothesis = decoder.decode(bins, session="{session}")\n```\n\n'
        f"Words: `arcuate decode {address} --data STORE`."
    )


def _references(run: Run) -> str:
    """References of data and methods; a run whose components may not be imported has none."""
    if not (run.recipe_file.is_file() and run.environment_file.is_file()):
        return ""
    try:
        return "\n".join(f"- {r.reference}" for r in cite(run).references)
    except UserError as error:
        return f"Not listed: {_plain(error)}"


# --- a card that exists ----------------------------------------------------------------------------------------


def _is_foreign(path: Path) -> bool:
    """Whether there is a card that arcuate did not write."""
    return path.exists() and not is_generated(read_card(path))


def is_generated(text: str) -> bool:
    """Whether a card has the line that ends the generated part."""
    return OWN_TEXT in text


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


def _read_own_parts(path: Path) -> tuple[str | None, str]:
    """Licence and user's text of the existing card, if there is one."""
    if not path.exists():
        return None, ""
    text = read_card(path)
    licence = card_metadata(text, str(path)).get("license")
    if licence is not None and not (isinstance(licence, str) and _LICENCE.fullmatch(licence)):
        raise UserError(f"{path}: the licence {licence!r:.60} is not an identifier such as cc-by-4.0; correct it")
    return licence, text.partition(OWN_TEXT)[2].removeprefix("\r").removeprefix("\n") if OWN_TEXT in text else ""


def exported_card(path: str | Path) -> str | None:
    """The card in an exported model; None if the path names a run."""
    if not is_export(path):
        return None
    archive = open_archive(path)
    if CARD not in archive:
        raise UserError(f"{path} contains no model card, because an earlier version wrote it; export the run again")
    try:
        return archive.bytes(CARD, _MAX_CARD_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"the model card in {path} is not UTF-8 text; export the run again") from None
