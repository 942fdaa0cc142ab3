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
# # 1. First decoder
#
# Simulate recordings of attempted speech, train a decoder, and read sentences from trials it has not seen. About two
# minutes on a laptop CPU; on a machine with a GPU the same code uses it.
#
# In a hosted notebook, install first from a clone or a wheel: `%pip install PATH`.

# %%
import shutil

import arcuate
from arcuate.insight.charts.plots import plot_sessions

STEPS = 400
shutil.rmtree("notebook", ignore_errors=True)  # start from nothing every time
bar = arcuate.ProgressBar()

# %% [markdown]
# Three sessions of 120 sentences on 64 electrodes, in the file layout of the Brain-to-Text '25 release. `prepare` checks
# every trial and writes a store.

# %%
arcuate.simulate("notebook/sim", n_sessions=3, n_trials=120, n_electrodes=64, difficulty="easy", progress=bar)
store = arcuate.prepare("notebook/sim", "notebook/store", progress=bar)
store

# %% [markdown]
# A recipe states everything that determines a run. `tiny` is the architecture of the official '25 baseline at laptop size.

# %%
run = arcuate.train("tiny", store, "notebook/run", overrides={"train.steps": STEPS}, progress=bar)
arcuate.plot_curves(run)

# %% [markdown]
# The phoneme error rate (PER) on validation trials, with a 95 % bootstrap interval over trials, and by session.

# %%
result = arcuate.evaluate(run, split="val")
print(f"PER {result.per:.1%}, 95 % interval {result.interval[0]:.1%} to {result.interval[1]:.1%}")
plot_sessions(result)

# %% [markdown]
# Words: the search combines the phoneme probabilities with a pronunciation lexicon and an n-gram language model.

# %%
words = arcuate.decode(run, split="val")
print(f"WER {words.wer:.1%}")
for line in words[:5]:
    print(f"{line.reference}  →  {line.text}")

# %% [markdown]
# Streaming: one bin of 20 ms at a time gives the same text.

# %%
trial = next(t for t in store.trials if t.split == "val")
decoder = arcuate.StreamingDecoder.load(run, session=trial.session, statistics=store.block_statistics(trial))
for row in store.read_bins(trial):
    decoder.push(row[None])
print(decoder.finish().text)

# %% [markdown]
# Next: change a setting (`overrides={"encoder.width": 192}`, or a recipe of your own: a YAML file with `extends: tiny`),
# compare the runs with `arcuate.compare(run_a, run_b)`, and see all of them on one page with `arcuate runs board notebook`.
# Notebook 2 looks at the data, notebook 3 rescues a run that does not learn.
