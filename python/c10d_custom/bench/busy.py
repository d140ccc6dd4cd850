"""Processes that do nothing but burn a core each, for figures on a machine that has other work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# They go when their parent does, however it ends.
_BURN = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(10 ** 6):
        pass
"""


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Inside, ``count`` such processes run."""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", _BURN, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for b in burners:
            b.kill()
        for b in burners:
            b.wait()
