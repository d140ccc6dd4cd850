"""Whatever kind of tensor a program hands an operation, and whoever looks on: as on gloo, in the same processes. See
watched.py."""

import itertools

import pytest
import torch

from c10d_custom.c10d.backend import REGISTERED

from . import watched
from .watched import KINDS, MODES, NO_ASYNC, OPERATIONS

pytestmark = pytest.mark.skipif(not REGISTERED, reason="torch before 2.14 has no Backend for Python")
FEW = {  # of each way that an operation passes its tensors, one: in place, lists of lists, one tensor, messages
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "message"),
}
SLOW = {"jit.trace", "make_fx", "export", "profiler", "vmap"}


def _kinds(operations):
    return [
        {"operation": o, "kind": k, "asynchronous": a, "outputs": outputs}
        for k, o, a, outputs in itertools.product(KINDS, operations, (False, True), (False, True))
        if not (a and o in NO_ASYNC)
    ]


def _modes(operations):
    return [
        {"operation": o, "mode": m, "asynchronous": a}
        for m, o, a in itertools.product(MODES, operations, (False, True))
        if not (a and o in NO_ASYNC)
    ]


def check(cells):
    return [wrong for cell in cells if (wrong := watched.agree(cell))]


def _run(ranks, cells, timeout=None):
    for wrong in ranks.run(check, cells, timeout=timeout):
        assert not wrong, "\n".join(wrong)


@pytest.mark.world_sizes(2)
def test_each_kind_of_tensor(ranks):
    """Each kind by a few operations, each operation by a few kinds; asynchronous or not by turns."""
    cells = [c for i, c in enumerate(_kinds(FEW)) if i % 2 == c["outputs"]]
    cells += [{"operation": o, "kind": k, "outputs": True} for o in OPERATIONS for k in ("asynchronous", "zero")]
    _run(ranks, cells)


@pytest.mark.world_sizes(2)
def test_each_mode(ranks):
    cells = [c for c in _modes(FEW) if not c["asynchronous"] and c["mode"] not in SLOW]
    cells += [{"operation": o, "mode": "dispatch", "asynchronous": True} for o in OPERATIONS if o not in NO_ASYNC]
    cells += [{"operation": o, "mode": m} for m in sorted(SLOW) for o in ("all_reduce", "all_gather_into_tensor")]
    _run(ranks, cells)


@pytest.mark.world_sizes(2)
@pytest.mark.full("each operation by each kind")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(ranks, kind):
    _run(ranks, [c for c in _kinds(OPERATIONS) if c["kind"] == kind], timeout=200)


@pytest.mark.world_sizes(2)
@pytest.mark.full("each operation under each mode")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(ranks, mode):
    _run(ranks, [c for c in _modes(OPERATIONS) if c["mode"] == mode], timeout=200)
