"""Weights: find a model (folder, GGUF file, hub id, built-in name), check it, read its tensors and its tokenizer."""
