"""Freed tensors go back to the system."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, torch
from headrace.trainer.heap import map_large_blocks

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "mapped" and not map_large_blocks():
    raise SystemExit("no mallopt")
torch.ones(5 << 20)  # 20 MiB, freed: from now on smaller blocks would come from the heap
before = resident_bytes()
blocks, pins = [], []
for _ in range(100):
    blocks.append(torch.ones(1 << 19))  # 2 MiB
    pins.append(torch.ones(1 << 14))  # too large for a hole that the imports left
del blocks
print(resident_bytes() - before)
"""


@pytest.mark.parametrize("mode", ["mapped", "plain"])
def test_holes_in_the_heap(mode):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=False
    )
    if "no mallopt" in done.stderr:
        pytest.skip("malloc is not glibc's")
    held = int(done.stdout)
    if mode == "mapped":
        assert held < 20 << 20
    else:
        assert held > 100 << 20, "the check sees no holes to begin with"
