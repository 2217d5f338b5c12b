"""`python -m forerun.bench`."""

from forerun.bench.engine import main

main()
