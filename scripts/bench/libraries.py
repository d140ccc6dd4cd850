"""The package's own benchmark (python -m c10d_custom bench), with one more library beside: oneCCL."""

from __future__ import annotations

from c10d_custom.bench import references, sweep

from .raw_oneccl import RawOneCcl

references.MORE["oneccl"] = lambda hosts: RawOneCcl()


def run(todo: sweep.Sweep) -> bool:
    """One rank's whole run. A rank that imports it has this file's library."""
    return sweep.run(todo)
