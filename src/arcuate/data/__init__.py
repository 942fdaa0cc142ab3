"""Recordings to batches: readers, quality checks, the store, splits, batching and augmentation."""
