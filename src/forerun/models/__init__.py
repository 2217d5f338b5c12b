"""Decoders, one file per Hugging Face `model_type`. They describe architectures and call `kernels/` for every product."""
