"""Write the golden runs anew, after a change of a format: PYTHONPATH=src python tests/golden/write.py

Store, texts, language model, scores and weights stay as they are; README.md says how they were made.
"""

import json
import os
import shutil
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import arcuate
from arcuate.adaptation.config import Calibration
from arcuate.experiments.train import TrainResult
from arcuate.training.callbacks import Callback, Stop

SMALL = ["data.max_sessions=2", "front_end.patch.bins=6", "train.keep_checkpoints=1"]
RUN = [
    *SMALL,
    *("encoder.width=16", "encoder.depth=1", "encoder.dropout=0.05", "front_end.session_layer.dropout=0"),
    *("train.steps=1000", "train.log_every=50", "train.validate_every=500", "train.checkpoint_every=500"),
    *("schedule.peak_lr=0.02", "schedule.min_lr=0.0005", "schedule.warmup_steps=30", "schedule.warmup_fraction=0"),
    *("ema.decay=0.95", "guard.stuck.patience=500", "augment.white_noise_sd=0.2", "augment.offset_sd=0.1"),
    *("augment.time_masks.n_masks=2", "augment.time_masks.max_fraction=0.05"),
]
SSM = [
    *SMALL,
    *("encoder.width=8", "encoder.depth=1", "encoder.n_heads=2", "encoder.state_dim=4", "transducer.width=8"),
    *("denoiser.width=8", "stages.ctc.steps=300", "stages.joint.steps=10", "stages.mode.steps=10"),
    *("stages.denoise.steps=10", "schedule.peak_lr=0.02", "augment.white_noise_sd=0.1", "augment.offset_sd=0.1"),
    *("guard.stuck.patience=500", "optimizer.session_lr_factor=0.5", "validate.search=beam"),
    *("train.log_every=50", "train.validate_every=300", "train.checkpoint_every=300"),
]
STOPPED = [
    *SMALL,
    *("encoder.width=8", "encoder.depth=1", "train.steps=400", "train.log_every=20", "train.validate_every=50"),
    *("train.checkpoint_every=200", "schedule.peak_lr=0.00001", "schedule.min_lr=0", "guard.stuck.patience=60"),
    *("guard.max_rewinds=1",),
]


class StopAfter(Callback):
    def __init__(self, stop: Stop, step: int) -> None:
        self.stop, self.last = stop, step

    def on_step(self, step: int) -> None:
        if step == self.last:
            self.stop.request()


def write_runs() -> dict[str, TrainResult]:
    for name in ("run-interrupted", "run", "run-ssm", "run-stopped", "run-calibrated"):
        shutil.rmtree(name, ignore_errors=True)
    stop = Stop()
    arcuate.train("tiny", "store", "run-interrupted", overrides=RUN, callbacks=[StopAfter(stop, 951)], stop=stop)
    shutil.copytree("run-interrupted", "run", symlinks=True)
    resumed = arcuate.train("run/recipe.yaml", "store", "run", resume=True)
    arcuate.evaluate("run")
    staged = arcuate.train("mode-ssm-small", "store", "run-ssm", overrides=SSM)
    try:
        arcuate.train("tiny", "store", "run-stopped", overrides=STOPPED)
    except arcuate.UserError as error:
        print(error)
    settings = Calibration(steps=30, other_lr_factor=0.2)
    arcuate.calibrate("run", "store", "t15.2023.08.24", out="run-calibrated", sentences=6, curve=(), settings=settings)
    for name in ("run", "run-calibrated", "run-interrupted", "run-ssm", "run-stopped"):
        file = Path(name, "environment.json")
        file.write_text(file.read_text("utf-8").replace(f"{Path.cwd()}{os.sep}", ""), encoding="utf-8")
    return {"run-interrupted": resumed, "run-ssm": staged}


def describe(trained: dict[str, TrainResult]) -> dict[str, object]:
    """Results of the new files, as expected.json records them."""
    keys = ("per", "loss", "n_scored", "n_tokens")
    evaluated = {}
    for name in ("run", "run-ssm", "run-stopped", "run-calibrated", "model"):
        found = arcuate.evaluate(name, data="store" if name == "model" else None).to_dict()
        evaluated[name] = {key: found[key] for key in keys}
        if name != "run":
            shutil.rmtree(Path(name, "results"), ignore_errors=True)
    resumed = {}
    for name, result in trained.items():
        rows = [json.loads(line) for line in Path(result, "metrics.jsonl").read_text("utf-8").splitlines()]
        train, val = ([row for row in rows if row["split"] == split] for split in ("train", "val"))
        resumed[name] = {"steps": result.steps, "best_per": result.best_per, "best_step": result.best_step}
        resumed[name] |= {"train_loss": train[-1]["loss"], "val_loss": val[-1]["loss"]}
    verdict = arcuate.diagnose("run-stopped").to_dict()
    doctor = {key: verdict[key] for key in ("primary", "best_per", "best_step", "last_step")}
    return {"evaluate": evaluated, "resume": resumed, "doctor": {"run-stopped": doctor}}


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    trained = write_runs()
    expected = json.loads(Path("expected.json").read_text("utf-8"))
    Path("expected.json").write_text(json.dumps({**expected, **describe(trained)}, indent=1) + "\n", encoding="utf-8")
