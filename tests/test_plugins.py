"""Components from outside the package: import paths, permissions, entry points, the example packages, skeletons."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from arcuate import plugins
from arcuate.data.alphabet import CLASSES
from arcuate.data.store import Store
from arcuate.decoding.decoder import Decoder
from arcuate.errors import UserError
from arcuate.evaluation.evaluate import evaluate
from arcuate.experiments.new import new
from arcuate.experiments.recipe import load_recipe
from arcuate.experiments.train import train
from arcuate.exported.check_encoder import check_encoder
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import ModelConfig
from arcuate.models.io import load_model
from arcuate.models.model import Model
from arcuate.training.callbacks import Callback, Stop

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULE = '''
import torch
from pydantic import Field
from arcuate.config import PluginSettings
from arcuate.losses.config import CustomLossSettings
from arcuate.models.acoustic import TorchModel
from arcuate.models.config import PluginEncoderSettings
from arcuate.models.convolution import extract_patches
from arcuate.models.interfaces import Encoder


class LinearSettings(PluginEncoderSettings):
    width: int = 12
    shift: int = 0


class Linear(Encoder):
    Settings = LinearSettings

    def __init__(self, settings, patch, n_channels):
        super().__init__()
        self.settings, self.patch = settings, patch
        self.map = torch.nn.Linear(n_channels * patch.bins, settings.width)

    def start(self, n_trials):
        return torch.zeros(n_trials)

    def forward_with_layers(self, bins, n_frames, state, layers, lengths=None):
        frames = torch.tanh(self.map(extract_patches(bins, self.patch)))
        return frames.roll(-self.settings.shift, dims=1), state, {}

    def finish(self, state):
        return torch.zeros(len(state), 0, self.n_outputs)


class Recurrent(Linear):
    def __init__(self, settings, patch, n_channels):
        super().__init__(settings, patch, n_channels)
        self.rnn = torch.nn.GRU(settings.width, settings.width, batch_first=True)

    def start(self, n_trials):
        return torch.zeros(n_trials, self.settings.width)

    def forward_with_layers(self, bins, n_frames, state, layers, lengths=None):
        frames, state = self.rnn(self.map(extract_patches(bins, self.patch)), state[None])
        return frames, state[0], {}


class ValueDependent(Linear):
    def forward_with_layers(self, bins, n_frames, state, layers, lengths=None):
        frames, state, inner = super().forward_with_layers(bins, n_frames, state, layers)
        return frames if bins.abs().sum() == 0 else -frames, state, inner


class Sorting(Linear):
    def forward_with_layers(self, bins, n_frames, state, layers, lengths=None):
        frames, state, inner = super().forward_with_layers(bins, n_frames, state, layers)
        return frames.sort(-1).values, state, inner


class WrongState(Linear):
    def start(self, n_trials):
        return "state"


class BlankLoss:
    """Mean probability of the blank."""

    Settings = CustomLossSettings

    def __init__(self, settings):
        pass

    def __call__(self, outputs, tokens, n_tokens):
        return outputs.log_probs["ctc"][..., 0].exp().mean(1)


class FlipSettings(PluginSettings):
    probability: float = Field(0.5, ge=0, le=1)


class Flip:
    Settings = FlipSettings

    def __init__(self, settings):
        self.settings = settings

    def __call__(self, bins, generator):
        return -bins if float(torch.rand((), generator=generator)) < self.settings.probability else bins


class ScaleSettings(PluginSettings):
    factor: float = 1.0


class Scale(torch.nn.Module):
    Settings = ScaleSettings

    def __init__(self, settings, n_channels):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.full((n_channels,), settings.factor))

    def forward(self, bins):
        return bins * self.factor


class NoSettings:
    pass
'''


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of components in a folder on the path; nothing is allowed at the start."""
    name = f"lab_{abs(hash(str(tmp_path))) % 10**9}"
    (tmp_path / f"{name}.py").write_text(MODULE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(plugins.ALLOW_VARIABLE, raising=False)
    yield name
    os.environ.pop(plugins.ALLOW_VARIABLE, None)


def recipe_file(folder: Path, lab: str, *lines: str) -> Path:
    path = folder / "mine.yaml"
    encoder = f"encoder: {{kind: '{lab}:Linear', width: 16}}"
    path.write_text("\n".join(["extends: tiny", encoder, "train: {steps: 4, validate_every: 2}", *lines]), "utf-8")
    return path


def test_a_recipe_may_name_code(lab: str, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(tmp_path, lab))
    assert type(recipe.encoder).__name__ == "LinearSettings"
    assert recipe.model_dump(mode="json")["encoder"] == {"kind": f"{lab}:Linear", "width": 16, "depth": 1, "shift": 0}
    with pytest.raises(UserError, match="widht"):
        load_recipe(recipe_file(tmp_path, lab), ["encoder.widht=3"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [("nowhere.to:Be", "no module nowhere"), ("{lab}:Missing", "Missing"), ("{lab}:NoSettings", "Settings")],
)
def test_wrong_names_are_explained(lab: str, tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe("tiny", {"encoder": {"kind": kind.format(lab=lab)}})


def test_all_components_train_resume_and_evaluate(
    lab: str, tmp_path: Path, cohort_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_file(
        tmp_path,
        lab,
        f"loss: {{custom: {{kind: '{lab}:BlankLoss', weight: 0.1}}}}",
        f"augment: {{custom: [{{kind: '{lab}:Flip', probability: 0.3}}]}}",
        f"front_end: {{custom: {{kind: '{lab}:Scale', factor: 0.5}}}}",
    )
    whole = train(recipe, cohort_store, tmp_path / "whole")
    halt = _StopAt(2)
    parts = train(recipe, cohort_store, tmp_path / "parts", callbacks=[halt], stop=halt.stop)
    assert parts.interrupted and parts.steps < 4
    resumed = train(recipe, cohort_store, tmp_path / "parts", resume=True)
    a, b = (load_model(run.path / "checkpoints" / "last").state_dict() for run in (whole, resumed))
    assert all(torch.equal(a[name], b[name]) for name in a) and "front_end.custom.factor" in a
    assert evaluate(whole).per is not None
    rows = [json.loads(line) for line in (whole.path / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert any("custom" in row.get("losses", {}) for row in rows)
    monkeypatch.delenv(plugins.ALLOW_VARIABLE)  # as in another process
    reads = (lambda: load_model(whole.path / "checkpoints" / "best"), lambda: evaluate(whole.path))
    for read in (*reads, lambda: load_recipe(whole.path)):
        with pytest.raises(UserError, match=f"--allow-code {lab}"):
            read()
    plugins.allow_code(lab)
    assert load_model(whole.path / "checkpoints" / "best").config.settings.encoder.kind == f"{lab}:Linear"


def test_installed_losses_augmentations_and_front_end_steps_change_the_training(
    lab: str, tmp_path: Path, cohort_store: Path
) -> None:
    """Each is named by its entry point, and alone changes the weights that two steps give."""
    metadata = tmp_path / f"{lab}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {lab}\nVersion: 1.0\n", "utf-8")
    groups = {"losses": "BlankLoss", "augmentations": "Flip", "front_end_steps": "Scale"}
    lines = [f"[arcuate.{group}]\nmine-{lab} = {lab}:{name}\n" for group, name in groups.items()]
    (metadata / "entry_points.txt").write_text("".join(lines), "utf-8")
    parts: dict[str, dict[str, object]] = {
        "none": {},
        "loss": {"loss.custom": {"kind": f"mine-{lab}", "weight": 5.0}},
        "augmentation": {"augment.custom": [{"kind": f"mine-{lab}", "probability": 1.0}]},
        "step": {"front_end.custom": {"kind": f"mine-{lab}", "factor": 0.5}},
    }
    plugins._entry_points.cache_clear()
    try:
        weights = {}
        for name, overrides in parts.items():
            fixed = {"train.steps": 2, "train.validate_every": 2, "encoder.width": 16}
            run = train("tiny", cohort_store, tmp_path / name, overrides=fixed | overrides)
            weights[name] = load_model(run.path / "checkpoints" / "last").state_dict()
    finally:
        plugins._entry_points.cache_clear()
    for name in ("loss", "augmentation", "step"):
        assert not torch.equal(weights[name]["head.weight"], weights["none"]["head.weight"]), name
    assert "front_end.custom.factor" in weights["step"] and plugins.ALLOW_VARIABLE not in os.environ


class _StopAt(Callback):
    """Requests the end of training at a step."""

    def __init__(self, step: int) -> None:
        self.step, self.stop = step, Stop()

    def on_step(self, step: int) -> None:
        if step == self.step:
            self.stop.request()


def test_check_encoder_finds_what_is_wrong(lab: str, recwarn: pytest.WarningsRecorder) -> None:
    assert check_encoder(f"{lab}:Linear", {"width": 8}).passed
    assert check_encoder(f"{lab}:Recurrent", {"width": 8}).passed
    assert not [str(warning.message) for warning in recwarn if "export" in str(warning.message)]
    broken = check_encoder(f"{lab}:Linear", ["shift=1"])  # frames of the future
    failed = {check.name for check in broken.checks if check.passed is False}
    assert failed >= {"padding changes nothing", "streaming equals offline"} and not broken.passed


def model_of(kind: str, **settings: object) -> Model:
    """An untrained model with an encoder from outside the package, of two sessions and 6 channels."""
    overrides = {"encoder": {"kind": kind, **settings}, "front_end.normalise": "none"}
    torch.manual_seed(0)
    config = ModelConfig(
        settings=load_recipe("tiny", overrides).model, n_channels=6, sessions=("day1", "day2"), classes=CLASSES
    )
    return Model(config).eval()


def test_an_encoder_from_outside_is_exported(lab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="exported models need the extra `export`")
    from arcuate.experiments.export import write_export
    from arcuate.runtime import Decoder as ExportedDecoder

    monkeypatch.syspath_prepend(EXAMPLES / "my_encoder")
    bins = np.random.default_rng(0).normal(size=(90, 6)).astype(np.float32)
    for kind in ("my_encoder:SeparableConv", f"{lab}:Linear"):
        model = model_of(kind, width=16)
        write_export(tmp_path / "model.arcx", model, None)
        decoder = ExportedDecoder.load(tmp_path / "model.arcx", session="day2", warm=False)
        for chunk in np.array_split(bins, 7):
            decoder.push(chunk)
        found, expected = decoder.sentence_log_probs(), Decoder(TorchModel(model)).log_probs(bins, "day2")
        assert len(found) >= len(expected) - 2  # the last frames wait for the smoothing of later bins
        np.testing.assert_allclose(found, expected[: len(found)], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [("ValueDependent", "depends on values"), ("Sorting", "cannot be exported"), ("WrongState", "its state must")],
)
def test_encoders_that_cannot_be_exported_are_explained(lab: str, tmp_path: Path, name: str, message: str) -> None:
    pytest.importorskip("onnx", reason="exporting needs the extra `export`")
    from arcuate.experiments.export import write_export

    with pytest.raises(UserError, match=message):
        write_export(tmp_path / "model.arcx", model_of(f"{lab}:{name}", width=16), None)
    model = load_recipe("tiny", {"front_end.custom": {"kind": f"{lab}:Scale"}}).model
    config = ModelConfig(settings=model, n_channels=6, sessions=("day1",), classes=CLASSES)
    with pytest.raises(UserError, match=r"front_end\.custom"):
        write_export(tmp_path / "model.arcx", Model(config).eval(), None)


@pytest.mark.parametrize("name", ["my lab", "1lab", "a.b", ""])
def test_only_packages_can_be_allowed(name: str) -> None:
    with pytest.raises(UserError, match="not the name of a package"):
        plugins.allow_code(name)


@pytest.mark.parametrize("kind", ["encoder", "reader"])
def test_skeletons_are_the_examples(tmp_path: Path, kind: str) -> None:
    for path in new(kind, f"my_{kind}", tmp_path):
        assert path.read_text("utf-8") == (EXAMPLES / path.relative_to(tmp_path)).read_text("utf-8")
    with pytest.raises(UserError, match="exists"):
        new(kind, f"my_{kind}", tmp_path)


def test_a_skeleton_of_a_recipe_loads_and_impossible_names_are_refused(tmp_path: Path) -> None:
    (path,) = new("recipe", "first_try", tmp_path)
    assert load_recipe(path).name == "first_try"
    impossible = [("encoder", "My Encoder", "lower-case letters"), ("loss", "mine", "encoder, reader, recipe")]
    for kind, name, message in (*impossible, ("encoder", "json", "module of Python")):
        with pytest.raises(UserError, match=message):
            new(kind, name, tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh virtual environment in which both examples are installed from copies of their folders.

    Nothing is downloaded: arcuate and what it needs are those of this environment, by a path file. The examples are
    built and installed by pip.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    paths = [str(Path(plugins.__file__).parents[1]), *(p for p in sys.path if p.endswith("site-packages"))]
    (site / "surroundings.pth").write_text("\n".join(paths) + "\n", "utf-8")
    sources = shutil.copytree(EXAMPLES, folder / "sources")
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index"]
    packages = ["-e", str(sources / "my_encoder"), str(sources / "my_reader")]  # as the pages say, and copied
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, *packages]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert "my_reader" in {p.name for p in site.iterdir()}
    return python


def arcuate(python: Path, *arguments: str) -> dict:
    """Run a command beside the folders of the examples, which are called like their packages."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-m", "arcuate", *arguments, "--json"], cwd=python.parents[2] / "sources",
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_installed_examples_train(installed: Path, cohort_store: Path, tmp_path: Path) -> None:
    """The reader of CSV folders prepares a store, on which the encoder is trained and evaluated."""
    stored = Store.open(cohort_store)
    for info in stored.trials:
        folder = tmp_path / "csv" / info.session / info.split
        folder.mkdir(parents=True, exist_ok=True)
        np.savetxt(folder / f"{info.number}.csv", stored.read_bins(info)[:, :6], delimiter=",", fmt="%.5g")
        table = folder / "sentences.csv"
        head = "" if table.is_file() else "file,block,text\n"
        with table.open("a", encoding="utf-8") as file:
            file.write(f'{head}{info.number}.csv,{info.block},"{info.text or ""}"\n')
    report = arcuate(installed, "prepare", str(tmp_path / "csv"), str(tmp_path / "store"), "--layout", "my-reader")
    assert report["layout"] == "my-reader" and report["trials"] == len(stored.trials) and report["n_channels"] == 6
    assert arcuate(installed, "new", "check", "my-encoder", "width=16")["passed"]
    recipe = EXAMPLES / "my_encoder" / "recipe.yaml"
    run = tmp_path / "run"
    steps = ("train.steps=4", "train.validate_every=2", "encoder.width=16")
    arcuate(installed, "train", str(recipe), "--data", str(tmp_path / "store"), "--run", str(run), *steps)
    assert arcuate(installed, "evaluate", str(run))["n_trials"] > 0
