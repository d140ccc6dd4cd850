"""Ranks by hand over MPI that sends by libfabric: what has been sent leaves while its sender does not call MPI, and a
killed rank is the others' error, not their end."""

import os
import sys
from pathlib import Path

import pytest

from rig import Hosts

from .by_hand import Ranks

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

# The MPIs by name: (variables, which environment's Python). Over "sockets" MPICH keeps more than over "tcp", so that it
# shows more often what does not leave.
MPICH = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
VARIABLES = {"libfabric": MPICH, "sockets": {**MPICH, "FI_PROVIDER": "sockets"}, "Intel MPI": {}, "ucx": {}}
FULL = pytest.mark.full("the other provider, or MPI, by the same code")


def python_of(mpi):
    if mpi != "Intel MPI":
        return sys.executable
    if "C10D_TEST_INTEL_MPI" not in os.environ:
        pytest.skip("C10D_TEST_INTEL_MPI names no environment that has it (scripts/test --full makes one)")
    return Path(os.environ["C10D_TEST_INTEL_MPI"], "bin", "python")


@pytest.fixture(scope="module")
def hosts():
    with Hosts() as hosts:
        yield hosts


def ranks_of(mpi, hosts, monkeypatch, code):
    for name, value in VARIABLES[mpi].items():
        monkeypatch.setenv(name, value)
    return Ranks(hosts, ["hosta", "hosta", "hostb", "hostb"], code, python=python_of(mpi))


# After each step every rank waits for all others at the store, or computes while they go on: none calls MPI meanwhile.
AT_THE_STORE = """
import random, time
STEPS = 60
init(timeout=timedelta(seconds=25))
store = dist.distributed_c10d._get_default_store()
shared = random.Random(7)
SUM = sum(range(1, SIZE + 1))

def await_all(step, but=None):
    if RANK != but:
        store.set(f"{step}/{RANK}", "")
    if but in (None, RANK):
        store.wait([f"{step}/{r}" for r in range(SIZE) if r != but], timedelta(seconds=25))

def message(x, group, root):
    to, source = (RANK + 2) % SIZE, (RANK - 2) % SIZE
    sent, y = dist.isend(x, to, tag=3), torch.empty_like(x)
    dist.recv(y, source, tag=3)
    assert y.eq(source + 1).all()
    sent.wait()

def all_reduce(x, group, root):
    dist.all_reduce(x, group=group)
    assert x.eq(SUM).all()

def later(x, group, root):
    work = dist.all_reduce(x, group=group, async_op=True)
    time.sleep(0.01)
    work.wait()
    assert x.eq(SUM).all()

def broadcast(x, group, root):
    dist.broadcast(x, root, group=group)
    assert x.eq(root + 1).all()

def all_to_all(x, group, root):
    y = torch.empty(SIZE * len(x))
    dist.all_to_all_single(y, torch.cat([x] * SIZE))
    assert y.view(SIZE, -1).eq(torch.arange(1.0, SIZE + 1)[:, None]).all()

def gather(x, group, root):
    parts = [torch.empty_like(x) for _ in range(SIZE)] if RANK == root else None
    dist.gather(x, parts, dst=root)
    assert parts is None or all(part.eq(r + 1).all() for r, part in enumerate(parts))

def barrier(x, group, root):
    dist.barrier(group=group)

def new_group(x, group, root):
    ranks = shared.sample(range(SIZE), SIZE)
    groups.append(dist.new_group(ranks, timeout=timedelta(seconds=25)))

kinds = [barrier, all_reduce, later, broadcast, all_to_all, gather, message, new_group]
groups = [None]
for step in range(STEPS):
    kind = new_group if step < 10 else shared.choice(kinds)
    x = torch.full((shared.choice([1, 100, 5000, 100_000, 1_000_000]),), RANK + 1.0)
    kind(x, shared.choice(groups), shared.randrange(SIZE))
    wait, other = shared.choice(["all", "one", "none"]), shared.randrange(SIZE)
    if wait != "none":
        await_all(step, None if wait == "all" else other)
    elif RANK == other:
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            pass
await_all("end")
say(well=True)
dist.barrier()
"""


@pytest.mark.parametrize(
    "mpi", ["sockets", *(pytest.param(mpi, marks=FULL) for mpi in ("libfabric", "Intel MPI", "ucx"))]
)
def test_what_was_sent_leaves_while_its_sender_waits_for_something_else(hosts, monkeypatch, mpi):
    with ranks_of(mpi, hosts, monkeypatch, AT_THE_STORE) as ranks:
        assert ranks.all() == [{"well": True}] * 4


MANY = """
init(timeout=timedelta(seconds=25))
SIZES = [1] * 200 + [5000] * 20 + [100_000] * 3
if RANK == 0:
    works = [dist.isend(torch.full((size,), float(tag)), 3, tag=tag) for tag, size in enumerate(SIZES)]
    for work in works:
        work.wait()
elif RANK == 3:
    for tag, size in reversed(list(enumerate(SIZES))):
        x = torch.empty(size)
        dist.recv(x, 0, tag=tag)
        assert x.eq(tag).all()
dist.barrier()
say(well=True)
"""


@pytest.mark.parametrize("mpi", ["libfabric", *(pytest.param(mpi, marks=FULL) for mpi in ("Intel MPI", "sockets"))])
def test_many_messages_are_received_in_an_order_of_the_receiver_s_own(hosts, monkeypatch, mpi):
    with ranks_of(mpi, hosts, monkeypatch, MANY) as ranks:
        assert ranks.all() == [{"well": True}] * 4


# Rank 3 kills itself in the middle of whatever its main thread does then.
KILLED = """
import os, signal, threading, time
init(timeout=timedelta(seconds=40))
other = dist.new_group([3, 1, 2, 0])
small, large = torch.ones(3), torch.ones(4_000_000)
dist.all_reduce(small, group=other)
if RANK == 3:
    threading.Timer(AFTER, os.kill, (os.getpid(), signal.SIGKILL)).start()
told = []
try:
    while True:
        for group in (None, other):
            dist.all_reduce(large if LARGE else small, group=group)
            if not LARGE:
                time.sleep(0.01 * RANK)
except dist.DistBackendError as error:
    told.append(f"{type(error).__name__}: {error}")
for group in (None, other):
    try:
        dist.all_reduce(small, group=group)
    except dist.DistBackendError as error:
        told.append(type(error).__name__)
say(told=told)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "mpi, large, after",
    [
        ("libfabric", True, 0.3),
        *(
            pytest.param(mpi, large, after, marks=FULL)
            for mpi in ("libfabric", "Intel MPI", "ucx")
            for large in (False, True)
            for after in (0.05, 0.2, 0.5)
        ),
    ],
)
def test_survivors_of_a_killed_rank_get_an_error(hosts, monkeypatch, mpi, large, after):
    with ranks_of(mpi, hosts, monkeypatch, f"LARGE, AFTER = {large}, {after}\n{KILLED}") as ranks:
        for rank in range(3):
            status, said, errors = ranks.end(rank)
            assert status == 0 and len(said) == 1, (status, said, errors)
            told = said[0]["told"]
            assert len(told) == 3 and "rank 3 on hostb" in told[0] and told[0].startswith("PeerLostError"), told
