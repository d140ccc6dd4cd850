"""The package's own benchmark (python -m c10d_custom bench), with two more libraries beside: DeepSpeed's all_reduce in
shared memory, and oneCCL."""

from __future__ import annotations

from c10d_custom.bench import references, sweep

from .deepspeed_op import DeepSpeedOp
from .raw_oneccl import RawOneCcl

references.MORE.update(deepspeed=DeepSpeedOp, oneccl=lambda hosts: RawOneCcl())


def run(todo: sweep.Sweep) -> bool:
    """One rank's whole run. A rank that imports it has this file's libraries."""
    return sweep.run(todo)
