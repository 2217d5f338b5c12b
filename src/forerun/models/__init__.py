"""Decoders, one file per Hugging Face `model_type`. They call `kernels/` for every product."""
