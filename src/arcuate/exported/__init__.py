"""Exported models (`.arcx`): the file, its checks, and one streaming step in ONNX Runtime."""
