"""Which release of the package this is, and which revision: what ranks of different ones share in memory and tell each
other fits by luck, whatever the release."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__version__ = "0.1.0"

TESTED_TORCH = "2.11", "2.15"  # the oldest and the newest that the tests ran on


@functools.cache
def revision() -> str:
    """Alike for all builds of the same sources. Of a checkout in place, which no build has named (setup.py): of the
    modules that are there."""
    here = Path(__file__).parent
    try:
        return (here / "revision").read_text()
    except OSError:
        digest = hashlib.sha256()
        for path in sorted(here.rglob("*.py")):
            digest.update(path.read_bytes())
        return f"{digest.hexdigest()[:12]} (a checkout)"


def described() -> str:
    return f"{__version__}, revision {revision()}"
