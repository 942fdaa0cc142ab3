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
# # 3. Rescue a run with the doctor
#
# Break a run on purpose, diagnose it, and train the remedy.

# %%
import shutil

import arcuate

STEPS = 150
shutil.rmtree("notebook", ignore_errors=True)
arcuate.simulate("notebook/sim", n_sessions=2, n_trials=100, n_electrodes=32, difficulty="easy")
store = arcuate.prepare("notebook/sim", "notebook/store")

# %% [markdown]
# Adam's `eps` of the official baselines, 0.1, without their learning rate and loss: the updates are far too small. The guard,
# which would correct this while training, is off. The doctor needs at least five validations.

# %%
broken = arcuate.train(
    "tiny",
    store,
    "notebook/broken",
    overrides={
        "train.steps": STEPS,
        "train.validate_every": STEPS // 6,
        "optimizer.eps": 0.1,
        "guard.enabled": False,
    },
)
arcuate.plot_curves(broken)

# %%
diagnosis = arcuate.diagnose("notebook/broken")
print(diagnosis.primary)
for line in diagnosis.evidence:
    print("-", line)
diagnosis.plot()

# %% [markdown]
# The remedy is a recipe that extends that of the run and states only the changes.

# %%
remedy = diagnosis.fix()
for change in remedy.changes:
    print(change)
cured = arcuate.train("notebook/broken", store, "notebook/cured", overrides=remedy.overrides)
print(f"best PER: broken {broken.best_per:.1%}, cured {cured.best_per:.1%}")

# %%
arcuate.compare("notebook/broken", "notebook/cured").plot()
