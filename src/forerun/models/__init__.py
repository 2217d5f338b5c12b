"""Decoders, one file per family of Hugging Face's `model_type`s. They call `kernels/` for every product."""
