"""Memory of a process that trains or serves."""

from __future__ import annotations

import subprocess
import sys

_STEPS, _BLOCKS, _BLOCK_BYTES, _PAGE_BYTES = 20, 6, 8 << 20, 4096
_PROGRAM = f"""
import resource
from cluster.process_memory import long_lived

with long_lived():
    import numpy as np

def step():
    return [np.ones({_BLOCK_BYTES}, np.uint8) for _ in range({_BLOCKS})]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

step()
before = faults()
for _ in range({_STEPS}):
    step()
print(faults() - before)
"""


def test_memory_that_a_step_frees_serves_the_next_step() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, check=True)
    pages = _STEPS * _BLOCKS * _BLOCK_BYTES // _PAGE_BYTES
    assert int(ran.stdout) < pages / 10
