"""How a job comes to be: the launcher's environment, the rendezvous of ranks without an address, MPI's start. Imported
by all above."""

from __future__ import annotations

import re


def mapped_files(pattern: str) -> list[str]:
    """The files that this process has mapped into its memory, libraries and shared memory that has a name, whose whole
    path is like the regular expression, each once; those removed since do not count."""
    with open("/proc/self/maps") as f:
        paths = dict.fromkeys(line.rstrip("\n").split(maxsplit=5)[-1] for line in f)
    return [path for path in paths if re.fullmatch(pattern, path)]
