"""Names that other trainers give to settings: those of the '24 and '25 baselines, their forks, and Hydra configs.

An unknown setting that has one of these names is answered with ours and the converted value.
"""

from collections.abc import Mapping
from typing import Any

from arcuate.config import to_yaml_line

_DECAY = "optimizer.weight_decay={{weights: {0}, biases: {0}, session_layers: {0}}}"

# Lower case without underscores -> ours; {} is the value. A pair of texts: if the value is true, if it is false.
NAMES: dict[str, str | tuple[str, str]] = {
    # optimizer and schedule
    "lr": "schedule.peak_lr={}",
    "lrmax": "schedule.peak_lr={}",
    "maxlr": "schedule.peak_lr={}",
    "peaklr": "schedule.peak_lr={}",
    "learningrate": "schedule.peak_lr={}",
    "lrstart": "schedule.kind=constant schedule.peak_lr={}",
    "lrend": "schedule.min_lr={} (schedule.kind=warmup_cosine or linear)",
    "lrmin": "schedule.min_lr={}",
    "minlr": "schedule.min_lr={0}; of an adaptive reduction: guard.adaptive.min_lr={0}",
    "warmupsteps": "schedule.warmup_steps={}",
    "lrwarmupsteps": "schedule.warmup_steps={}",
    "lrdecaysteps": "schedule.decay_steps={}",
    "cosinetmax": "schedule.decay_steps={} + the steps of the warm-up",
    "pctstart": "schedule.kind=one_cycle schedule.pct_start={}",
    "divfactor": "schedule.kind=one_cycle schedule.div_factor={}",
    "finaldivfactor": "schedule.kind=one_cycle schedule.final_div_factor={}",
    "patience": "schedule.kind=plateau schedule.patience={} (validations)",
    "factor": "schedule.kind=plateau schedule.factor={}",
    "epsilon": "optimizer.eps={}",
    "eps": "optimizer.eps={}",
    "betas": "optimizer.betas={}",
    "weightdecay": _DECAY,
    "l2decay": _DECAY,
    "usefusedadamw": "optimizer.fused={}",
    "fused": "optimizer.fused={}",
    "adaptivelr": ("guard.adaptive.threshold=10", "guard.adaptive.threshold=null"),
    "lrreductionfactor": "guard.adaptive.factor={}",
    "lrreductionthreshold": "guard.adaptive.threshold={}",
    "maxlrreductions": "guard.adaptive.max_reductions={}",
    # training
    "nbatch": "train.steps={}",
    "numbatches": "train.steps={}",
    "numtrainingbatches": "train.steps={}",
    "batchsize": "data.batching.batch_size={} (by session: data.batching.n_sessions × data.batching.n_trials)",
    "gradientaccumulationsteps": "train.accumulate={}",
    "maxgradnorm": "train.clip_norm={}",
    "gradclipnorm": "train.clip_norm={}",
    "gradnormclipvalue": "train.clip_norm={}",
    "gradclip": "train.clip_norm={}",
    "maxnorm": "train.clip_norm={}",
    "useamp": ("train.precision.kind=bf16", "train.precision.kind=fp32"),
    "seed": "train.seed={}",
    "numworkers": "data.workers={}",
    "usebeamsearch": ("validate.search=beam", "validate.search=greedy"),
    "numchannels": "the channels of the store ({} in yours); no setting is needed",
    "ndays": "the sessions of the store; data.max_sessions={} takes the first ones",
    "dataroot": "--data STORE, which arcuate prepare makes of {}",
    # model
    "nunits": "encoder.width={}",
    "nlayers": "encoder.depth={}",
    "bidirectional": "encoder.bidirectional={}",
    "dropout": "encoder.dropout={}",
    "rnndropout": "encoder.dropout={}",
    "inputdropout": "front_end.session_layer.dropout={}",
    "uselayernorm": "front_end.session_layer.layer_norm={}",
    "kernellen": "front_end.patch.bins={}",
    "patchsize": "front_end.patch.bins={}",
    "stridelen": "front_end.patch.stride={}",
    "patchstride": "front_end.patch.stride={}",
    "flowbridge": "denoiser.enabled={}",
    # augmentation
    "whitenoisesd": "augment.white_noise_sd={}",
    "whitenoisestd": "augment.white_noise_sd={}",
    "constantoffsetsd": "augment.offset_sd={}",
    "constantoffsetstd": "augment.offset_sd={}",
    "randomcut": "augment.random_cut={}",
    "gaussiansmoothwidth": "front_end.smoothing.sd={}",
    "smoothkernelstd": "front_end.smoothing.sd={}",
    "timemaskprob": "augment.time_masks.probability={}",
    "timemaskwidth": "augment.time_masks.max_bins={}",
    "timemaskmaxmasks": "augment.time_masks.n_masks={}",
    "freqmaskprob": "augment.feature_masks.probability={}",
    "freqmaskwidth": "augment.feature_masks.max_channels={}",
    "freqmaskmaxmasks": "augment.feature_masks.n_masks={}",
    # Weights & Biases
    "wandbenabled": "track.wandb.enabled={}",
    "wandbproject": "track.wandb.project={}",
    "wandbentity": "track.wandb.entity={}",
    "wandbrunname": "track.wandb.run_name={}",
    "wandbtags": "track.wandb.tags={}",
    "wandbnotes": "purpose={}",
}


def translate(path: str, value: Any) -> str | None:
    """Our settings for one of another trainer, `whiteNoiseSD` or `training.optimizer.lr`; None if it is unknown.

    The last parts of the path are compared, without case and underscores. A component is translated setting by setting.
    """
    parts = path.replace("-", "_").replace("_", "").lower().split(".")
    for name in ("".join(parts[-2:]), parts[-2] if parts[-1] == "enabled" and len(parts) > 1 else "", parts[-1]):
        if (ours := NAMES.get(name)) is None or isinstance(value, Mapping):
            continue
        if isinstance(ours, tuple):
            return ours[0] if value else ours[1]
        return ours.format(to_yaml_line(value))
    if not isinstance(value, Mapping):
        return None
    found = [translate(f"{path}.{key}", inner) for key, inner in value.items()]
    return " ".join(text for text in found if text) or None
