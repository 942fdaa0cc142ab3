# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. Look at the data
#
# What a recording looks like, how electrodes are tuned to phonemes, and how sessions drift.

# %%
import shutil

import altair as alt
import numpy as np
import pandas as pd

import arcuate
from arcuate.data.alphabet import CLASSES

SESSIONS, TRIALS = 4, 80
alt.data_transformers.disable_max_rows()
shutil.rmtree("notebook", ignore_errors=True)
arcuate.simulate("notebook/sim", n_sessions=SESSIONS, n_trials=TRIALS, n_electrodes=64, seed=1)
store = arcuate.prepare("notebook/sim", "notebook/store")
store

# %% [markdown]
# One line per trial:

# %%
store.to_frame().groupby(["session", "split"]).agg(trials=("id", "count"), seconds=("n_bins", lambda n: n.sum() * 0.02))

# %% [markdown]
# A raster: threshold crossings of 64 electrodes over one sentence, one column per 20-ms bin.

# %%
trial = next(t for t in store.trials if t.split == "train")
bins = store.read_bins(trial)
crossings = bins[:, : store.n_channels // 2]
raster = pd.DataFrame(crossings).melt(ignore_index=False, var_name="electrode", value_name="crossings")
raster["seconds"] = 0.02 * raster.index
alt.Chart(raster, title=trial.text).mark_rect().encode(
    x=alt.X("seconds:Q", bin=alt.Bin(maxbins=200)),
    y="electrode:O",
    color=alt.Color("mean(crossings):Q").scale(scheme="greys"),
).properties(width=600, height=300)

# %% [markdown]
# Tuning without alignments: the correlation over trials between the mean activity of an electrode and how often a phoneme
# occurs in the sentence. It is crude, and still shows that electrodes differ.

# %%
trials = [t for t in store.trials if t.split == "train" and t.tokens]
activity = np.stack([store.read_bins(t)[:, : store.n_channels // 2].mean(0) for t in trials])
counts = np.stack([np.bincount(t.tokens, minlength=len(CLASSES)) / t.n_bins for t in trials])[:, 1:-1]
activity = (activity - activity.mean(0)) / (activity.std(0) + 1e-6)
counts = (counts - counts.mean(0)) / (counts.std(0) + 1e-6)
tuning = pd.DataFrame(activity.T @ counts / len(trials), columns=CLASSES[1:-1])
cells = tuning.melt(ignore_index=False, var_name="phoneme", value_name="correlation").reset_index(names="electrode")
alt.Chart(cells).mark_rect().encode(
    x="phoneme:N", y="electrode:O", color=alt.Color("correlation:Q").scale(scheme="purpleorange", domainMid=0)
).properties(width=600, height=300)

# %% [markdown]
# Drift: the mean of every electrode moves from session to session.

# %%
from arcuate.adaptation.drift import measure_drift

drift = measure_drift(store)
drift.to_dict()["sessions"]
