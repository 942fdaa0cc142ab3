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
# # 4. Words and confidence
#
# From phoneme probabilities to words, the alternatives that were considered, and how sure the decoder is.

# %%
import shutil

import arcuate
from arcuate.decoding.options import SearchOptions

STEPS = 400
shutil.rmtree("notebook", ignore_errors=True)
arcuate.simulate("notebook/sim", n_sessions=3, n_trials=120, n_electrodes=64, seed=2)
store = arcuate.prepare("notebook/sim", "notebook/store")
run = arcuate.train("tiny", store, "notebook/run", overrides={"train.steps": STEPS})

# %%
words = arcuate.decode(run, split="val")
print(f"WER {words.wer:.1%}")
words.to_frame().head()

# %% [markdown]
# The n-best list of one sentence: the score is the acoustic log-probability plus the weighted language model.

# %%
line = words[0]
print("reference:", line.reference)
for hypothesis in line.n_best[:5]:
    print(f"{hypothesis.total:8.1f}  {hypothesis.text}")

# %% [markdown]
# The probability that each word is right, estimated from the lattice and calibrated.

# %%
for line in words[:5]:
    if line.n_best:
        best = line.n_best[0]
        print("  ".join(f"{word} {p:.0%}" for word, p in zip(best.words, best.confidences, strict=False)))

# %% [markdown]
# A wider beam finds better hypotheses and takes longer; the language-model weight trades acoustics against words. `tune`
# chooses the weights on held-out trials.

# %%
for beam in (10, 50, 200):
    print(beam, f"{arcuate.decode(run, SearchOptions(beam=beam), split='val').wer:.1%}")
