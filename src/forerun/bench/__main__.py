"""`python -m forerun.bench SUITE`: runs one suite; its last line is JSON. `forerun bench` is the suite for users."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from forerun.errors import ForerunError

SUITES = {
    "engine": "plain decoding, lookup and transformers beside each other; what choosing costs (make bench)",
    "mtp": "what the built-in head gets accepted, and what that is worth (make bench-mtp)",
    "gpu": "how near to the memory limit rounds are on a GPU (make bench-gpu)",
    "gpu-batches": "what drafting is worth on a GPU by batch size and depth",
    "http": "what serving costs beside the engine alone, with 1, 4, 16 clients",
    "fleet": "which replica answers: hit rate and waiting of 1 to 1000 simulated replicas, by the routing code itself",
    "soak": "mixed clients for minutes: no wrong text, nothing left behind, memory flat",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the suite, hand it its options, print the figures it returns."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    listed = "\n".join(f"  {name:12} {about}" for name, about in SUITES.items())
    front = ArgumentParser("python -m forerun.bench", epilog=listed, formatter_class=RawDescriptionHelpFormatter)
    front.add_argument("suite", choices=SUITES, metavar="SUITE", help="one of those below")
    name = front.parse_args(given[:1]).suite
    parser = ArgumentParser(f"{front.prog} {name}", description=SUITES[name])
    if name.startswith("gpu"):
        import torch

        if not torch.cuda.is_available():
            parser.exit(2, "this measures an NVIDIA GPU, and torch sees none\n")
    suite = import_module(f"forerun.bench.suites.{name.replace('-', '_')}")  # each needs other libraries
    suite.add_options(parser)
    options = parser.parse_args(given[1:])
    try:
        print(json.dumps(suite.measure(options)))
    except ForerunError as error:
        parser.exit(2, f"forerun: {error}\n")


if __name__ == "__main__":
    main()
