"""Triton bodies for NVIDIA GPUs, one file per kind of operation."""
