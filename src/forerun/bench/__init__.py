"""Measured on this machine, interleaved in one run."""
