"""Whatever kind of tensor a program hands an operation, and whoever looks on: as on gloo, in the same processes. See
watched.py."""

import itertools
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

from c10d_custom.c10d.backend import REGISTERED

from . import watched
from .watched import KINDS, MODES, NO_ASYNC, OPERATIONS

seen = pytest.mark.skipif(not REGISTERED, reason="torch before 2.14 has no Backend for Python")
# Of each way that an operation passes its tensors, one: in place, lists of lists, one tensor, messages.
FEW = "all_reduce", "all_gather", "reduce_scatter_tensor", "message"
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


@seen
@pytest.mark.world_sizes(2)
def test_each_kind_of_tensor(ranks):
    """Each kind by a few operations, each operation by two kinds; asynchronous, and outputs of the kind, by turns."""
    cells = [c for c in _kinds(FEW) if c["asynchronous"] != c["outputs"]][::2]
    cells += [c for c in _kinds(("all_reduce", "message")) if not c["asynchronous"] and not c["outputs"]]
    cells += [{"operation": o, "kind": k, "outputs": True} for o in OPERATIONS for k in ("asynchronous", "zero")]
    _run(ranks, cells)


@seen
@pytest.mark.world_sizes(2)
def test_each_mode(ranks):
    cells = [c for c in _modes(FEW) if not c["asynchronous"] and c["mode"] not in SLOW]
    cells += [{"operation": o, "mode": "dispatch", "asynchronous": True} for o in OPERATIONS if o not in NO_ASYNC]
    cells += [{"operation": "all_reduce", "mode": m} for m in sorted(SLOW)]
    _run(ranks, cells)


@seen
@pytest.mark.world_sizes(2)
@pytest.mark.full("each operation by each kind")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(ranks, kind):
    _run(ranks, [c for c in _kinds(OPERATIONS) if c["kind"] == kind], timeout=200)


@seen
@pytest.mark.world_sizes(2)
@pytest.mark.full("each operation under each mode")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(ranks, mode):
    _run(ranks, [c for c in _modes(OPERATIONS) if c["mode"] == mode], timeout=200)


def counted():
    """{operation: whether each of its tensors counts as changed}, on either backend, as autograd asks."""
    found = {}
    for backend in ("gloo", "custom"):
        group = dist.new_group(backend=backend)
        for name, asynchronous in itertools.product(OPERATIONS, (False, True)):
            if name in NO_ASYNC or name == "barrier" or (name == "all_to_all" and not REGISTERED):
                continue  # an older gloo has no all_to_all of lists
            tensors = []

            class Noting(watched.Cell):
                def mine(self, x):
                    tensors.append(x.clone())
                    return tensors[-1]

                def empty(self, x):
                    return self.mine(x)

            OPERATIONS[name](torch.ones(4), Noting(group, asynchronous=asynchronous))
            found.setdefault((name, asynchronous), []).append([t._version > 0 for t in tensors])
        dist.destroy_process_group(group)
    return {cell: both for cell, both in found.items() if both[0] != both[1]}


@pytest.mark.world_sizes(2)
def test_what_counts_as_a_change(ranks):
    """An output that autograd has saved, and an operation has written to since, is found by its version."""
    assert ranks.run(counted) == [{}, {}]


def written_to(strided):
    w = torch.ones(4, 2, requires_grad=True)
    y = (w * 1).t() if strided else w * 1
    z = y * y
    with torch.no_grad():
        dist.all_gather([torch.ones_like(y), y], torch.full_like(y, 3.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("strided", [False, True])
def test_a_saved_output_is_not_used(ranks, strided):
    ranks.run(written_to, strided)


def asked_of_works():
    peer, got = 1 - dist.get_rank(), torch.zeros(3)
    for watch in (torch.profiler.profile, watched.Seen):
        with watch():
            sent = dist.isend(torch.ones(3), peer)
            assert dist.recv(got) == peer
            sent.wait()
            assert sent.is_completed() and sent.exception() is None


@seen
@pytest.mark.world_sizes(2)
def test_works_of_watched_calls_answer_as_others_do(ranks):
    ranks.run(asked_of_works)


def warned():
    w = torch.ones(3, requires_grad=True)
    y = w * 2
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dist.all_reduce(y)
        y.sum().backward()
    return [str(f.message) for f in found if "autograd kernel" in str(f.message)]


@seen
@pytest.mark.world_sizes(2)
def test_torch_warns_of_a_graph(ranks):
    assert [len(found) for found in ranks.run(warned)] == [1, 1]


def threads():
    """While a call of one thread goes through the dispatcher, calls of another do as well."""
    group, seen = dist.new_group(), []
    other = dist.new_group()

    def watching():
        with watched.Seen() as mode:
            for _ in range(50):
                dist.all_reduce(torch.ones(1), group=other)
        seen.extend(mode.seen)

    thread = threading.Thread(target=watching)
    thread.start()
    t = torch.ones(2)
    for _ in range(200):
        dist.broadcast(t, 0, group=group)
    thread.join()
    assert len(seen) == 50
    assert type(other).__name__ == type(group).__name__ == "CustomProcessGroup"
    for made in (group, other):
        dist.destroy_process_group(made)


@seen
@pytest.mark.world_sizes(2)
def test_only_the_watched_thread_is_seen(ranks):
    ranks.run(threads)
