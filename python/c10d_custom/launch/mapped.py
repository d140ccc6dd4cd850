"""Files that this process has mapped into its memory: libraries, and shared memory that has a name."""

from __future__ import annotations

import re


def mapped_files(pattern: str) -> list[str]:
    """Those whose whole path is like the regular expression, each once; those removed since do not count."""
    with open("/proc/self/maps") as f:
        paths = dict.fromkeys(line.rstrip("\n").split(maxsplit=5)[-1] for line in f)
    return [path for path in paths if re.fullmatch(pattern, path)]
