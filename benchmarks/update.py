"""Prints the figures of the host update that the documentation states.

Run: python benchmarks/update.py [--num-parameters 100M] [--threads N] [--json]

The same as ``headrace bench update``; the measuring code is ``headrace.bench.update``.
"""

import sys

from headrace.cli import main

if __name__ == "__main__":
    main(["bench", "update", *sys.argv[1:]])
