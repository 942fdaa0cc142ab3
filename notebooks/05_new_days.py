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
# # 5. New days
#
# Recordings drift: a decoder that worked last week is worse today. Measure it, adapt without labels, or calibrate with a few
# sentences that the participant copies.

# %%
import shutil

import arcuate

STEPS, SENTENCES = 400, 20
shutil.rmtree("notebook", ignore_errors=True)
arcuate.simulate("notebook/sim", n_sessions=3, n_trials=120, n_electrodes=64, difficulty="easy", later=[8])
store = arcuate.prepare("notebook/sim", "notebook/store")
store

# %% [markdown]
# Train on the first sessions only; the last one is eight days later.

# %%
run = arcuate.train("tiny", store, "notebook/run", overrides={"train.steps": STEPS, "data.max_sessions": 3})
later = store.sessions[-1]

# %% [markdown]
# Adaptation without labels: after every sentence the decoder learns from its own output (one gradient step on several
# augmented copies).

# %%
result = arcuate.evaluate(run, data=store.path, adapt=True)
result.to_dict()

# %% [markdown]
# Calibration: twenty sentences with known text.

# %%
calibrated = arcuate.calibrate(run, store, later, sentences=SENTENCES, out="notebook/calibrated")
calibrated.to_dict()
