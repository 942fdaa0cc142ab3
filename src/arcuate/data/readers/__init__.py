"""Readers of recordings: find the files of a release, count their trials, read them trial by trial.

Two layouts are known: Brain-to-Text '25 (`<session>/data_{train,val,test}.hdf5`) and Brain-to-Text '24
(`{train,test,competitionHoldOut}/<session>.mat`). Every file is treated as possibly damaged or hostile.
"""
