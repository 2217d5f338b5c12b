"""Measured on this machine, interleaved in one run: `forerun bench`, and `python -m forerun.bench SUITE`."""
