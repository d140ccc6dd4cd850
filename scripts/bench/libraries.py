"""The package's own benchmark (python -m c10d_custom bench), with more libraries beside: DeepSpeed's op, oneCCL."""

from __future__ import annotations

from c10d_custom.bench import references, sweep

from .deepspeed_op import DeepSpeedOp
from .raw_oneccl import RawOneCcl

references.MORE["deepspeed"] = DeepSpeedOp
references.MORE["oneccl"] = lambda hosts: RawOneCcl()


def run(todo: sweep.Sweep) -> bool:
    """One rank's whole run. A rank that imports it has this file's libraries."""
    return sweep.run(todo)
