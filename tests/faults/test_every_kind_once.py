"""What happens when ranks disagree, are late, die or are interrupted: here every kind once. The files beside this one
test each kind to destruction."""

import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from c10d_custom.c10d.issuing import NewGroup
from c10d_custom.c10d.process_group import build
from c10d_custom.errors import (
    AbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CustomBackendError,
    PeerLostError,
    TransportError,
    UsageError,
)
from harness import RankFailure, RankPool
from harness.groups import MAKING, group_with_timeout

HUNG = 20.0  # seconds after which a rank counts as having hung; the groups' own time-out is longer where none is given


def raised(call, *kinds):
    """The exception ``call`` raises; AssertionError unless it is of one of the kinds."""
    started = time.monotonic()
    try:
        call()
    except kinds as error:
        error.seconds = time.monotonic() - started
        return error
    raise AssertionError("nothing was raised")


def disagreements(rank):
    """{field: (the two callables of which rank 0 takes the first and the others the second)}"""

    def all_reduce(n=4, dtype=torch.float32, op=ReduceOp.SUM):
        return lambda g: dist.all_reduce(torch.ones(n, dtype=dtype), op, group=g)

    return {
        "op": (all_reduce(), lambda g: dist.barrier(g)),
        "count": (all_reduce(), all_reduce(5)),
        "count, long": (all_reduce(1 << 20), all_reduce((1 << 20) + 1)),
        "short against long": (all_reduce(), all_reduce(1 << 20)),
        "dtype": (all_reduce(), all_reduce(dtype=torch.int32)),
        "redop": (all_reduce(), all_reduce(op=ReduceOp.MAX)),
        "root": (
            lambda g: dist.broadcast(torch.ones(4), group=g, group_src=0),
            lambda g: dist.broadcast(torch.ones(4), group=g, group_src=1),
        ),
        "splits": (
            lambda g: dist.all_to_all_single(torch.empty(g.size()), torch.empty(g.size()), group=g),
            lambda g: dist.all_to_all_single(torch.empty(2 * g.size()), torch.empty(2 * g.size()), group=g),
        ),
        "refused": (
            lambda g: dist.all_reduce(torch.ones(4, dtype=torch.complex64).real.to(torch.bool), ReduceOp.AVG, group=g),
            all_reduce(),
        ),
    }


def mismatch_case(field, asynchronous):
    rank = dist.get_rank()
    group = dist.new_group()
    mine = disagreements(rank)[field][0 if rank == 0 else 1]
    if asynchronous:
        plain, mine = mine, lambda g: plain(g)
    kind = UsageError if field == "refused" and rank == 0 else CollectiveMismatchError
    error = raised(lambda: mine(group), kind)
    text = str(error)
    wrong = []
    if kind is CollectiveMismatchError:
        wrong += [r for r in range(group.size()) if f"rank {r}:" not in text]
        if field.split(",")[0] in ("op", "count", "dtype", "redop", "root") and field.split(",")[0] not in text:
            wrong.append("field not named")
    if error.seconds > 5:
        wrong.append(f"took {error.seconds:.1f} s")
    if field != "refused":
        after = raised(lambda: dist.barrier(group), CustomBackendError)
        if "no more use" not in str(after):
            wrong.append(f"afterwards: {after}")
    t = torch.ones(3)
    dist.all_reduce(t)  # the other groups of these ranks go on
    if not torch.equal(t, torch.full((3,), float(dist.get_world_size()))):
        wrong.append(f"world group: {t}")
    return f"{wrong} in {text}" if wrong else None


@pytest.mark.world_sizes(2, 4)
@pytest.mark.parametrize("field", list(disagreements(0)))
def test_disagreement_is_told_to_every_rank(ranks, field):
    assert not any(found := ranks.run(mismatch_case, field, False)), found


def refused_everywhere_case():
    group = dist.new_group()
    wrong = []
    for _ in range(5):
        raised(lambda: dist.all_reduce(torch.ones(4), ReduceOp.BAND, group=group), UsageError)
        raised(lambda: dist.all_reduce(torch.ones(4, dtype=torch.bool), ReduceOp.AVG, group=group), UsageError)
        t = torch.ones(4)
        dist.all_reduce(t, group=group)
        if t[0] != group.size():
            wrong.append(t)
    return wrong


@pytest.mark.world_sizes(2, 3, 4)
def test_a_call_refused_on_all_ranks_leaves_the_group_usable(ranks):
    assert not any(found := ranks.run(refused_everywhere_case)), found


def message_mismatch_case():
    rank = dist.get_rank()
    if rank > 1:
        return None
    wrong = []
    for n, m, dtype in ((4, 5, torch.float32), (1 << 20, 5, torch.float32), (4, 4, torch.int32)):
        if rank == 0:
            request = dist.isend(torch.ones(n), 1)
            if n > 5:
                text = str(raised(request.wait, CollectiveMismatchError))
            else:
                request.wait()
                continue
        else:
            text = str(raised(lambda: dist.recv(torch.ones(m, dtype=dtype), 0), CollectiveMismatchError))
        if f"{4 * m} bytes" not in text or f"{4 * n} bytes" not in text:
            wrong.append(text)
    t = torch.full((3,), 7.0) if rank == 0 else torch.zeros(3)
    dist.send(t, 1) if rank == 0 else dist.recv(t, 0)
    return wrong or (None if t[0] == 7 else t)


@pytest.mark.world_sizes(2)
def test_a_message_that_does_not_fit_its_receive_is_told_to_both(ranks):
    assert not any(found := ranks.run(message_mismatch_case)), found


def timeout_case(kind):
    rank, size = dist.get_rank(), dist.get_world_size()
    group = group_with_timeout(timedelta(seconds=1))
    if rank == size - 1:
        time.sleep(2.5)
        return None
    call = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(4), group=group),
        "async": lambda: dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True).wait(),
        "recv": lambda: dist.recv(torch.ones(4), group=group, group_src=size - 1),
        "send": lambda: dist.send(torch.ones(1 << 20), group=group, group_dst=size - 1),
    }[kind]
    error = raised(call, CollectiveTimeoutError)
    wrong = [] if 0.9 < error.seconds < HUNG else [error.seconds]
    if f"rank {size - 1}" not in str(error):
        wrong.append(str(error))
    return wrong or None


@pytest.mark.world_sizes(2, 3)
@pytest.mark.parametrize("kind", ["all_reduce", "async", "recv", "send"])
def test_a_timeout_names_the_rank_that_is_missing(ranks, kind):
    assert not any(found := ranks.run(timeout_case, kind)), found


def wait_timeout_case():
    group = dist.new_group()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        error = raised(lambda: work.wait(timedelta(seconds=0.3)), CollectiveTimeoutError)
        assert 0.25 < error.seconds < HUNG, error.seconds
        assert not work.is_completed()
        work.wait()  # the operation went on
    else:
        time.sleep(1.0)
        dist.all_reduce(torch.ones(4), group=group)


@pytest.mark.world_sizes(2)
def test_wait_with_a_timeout_leaves_the_operation_alone(ranks):
    ranks.run(wait_timeout_case)


def late_message_case():
    group = group_with_timeout(timedelta(seconds=0.2))
    if dist.get_rank() == 0:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            group._add_ephemeral_timeout(timedelta(seconds=0.3))
            work = dist.irecv(torch.ones(4), group=group, group_src=1)
            error = raised(work.wait, CollectiveTimeoutError)
        assert 0.45 < error.seconds < HUNG, error.seconds
        assert "custom:recv" in [event.name for event in profile.events()]
        assert group._options(None, None)[1] == 0.2
    group.set_timeout(MAKING)
    dist.barrier(group)


@pytest.mark.world_sizes(2)
def test_after_an_asynchronous_message_that_is_late_its_longer_time_out_and_its_record_are_over(ranks):
    ranks.run(late_message_case)


def dying_case(kind):
    rank = dist.get_rank()
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        time.sleep(0.3)
        store.set("died", str(time.monotonic()))  # when it got round to it: it may have had to wait for a core
        os.kill(os.getpid(), signal.SIGKILL)
    call = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1 << 22), group=group),
        "async": lambda: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(),
        "recv": lambda: dist.recv(torch.ones(4), group=group, group_src=1),
        "send": lambda: dist.send(torch.ones(1 << 20), group=group, group_dst=1),
    }[kind]
    error = raised(call, PeerLostError)
    noticed = time.monotonic()
    raise RuntimeError(f"SURVIVOR {rank} noticed after {noticed - float(store.get('died')):.3f} s: {error}")


@pytest.mark.parametrize("kind", ["all_reduce", "async", "recv", "send"])
def test_a_dead_rank_is_named(kind, backend):
    pool = RankPool(3, backend)
    with pytest.raises(RankFailure) as failure:
        pool.run(dying_case, kind)
    text = str(failure.value)
    for survivor in (0, 2):
        # How soon, on a machine that has nothing else to do, is for scripts/soak: this is long before the time-out.
        noticed = re.search(rf"SURVIVOR {survivor} noticed after ([\d.]+) s", text)
        assert noticed and float(noticed[1]) < 20, text
    assert text.count("rank 1 (pid") >= 2 and "has died" in text, text


def sends_to_the_dead_case():
    rank, t = dist.get_rank(), torch.ones
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raised(lambda: dist.recv(t(3), 1), PeerLostError)
    sends = (
        lambda: dist.send(t(3), 1),
        lambda: dist.isend(t(3), 1).wait(),
        lambda: dist.send(t(1000, 2).t(), 1),
        lambda: dist.send(t(100_000), 1),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, t(3), 1)])[0].wait(),
        lambda: dist.send_object_list(["x"], 1),
    )
    texts = {str(raised(send, PeerLostError)).partition(": ")[2].partition(", noticed")[0] for send in sends}
    if rank == 0:
        dist.send(t(3), 2)  # the group goes on
    else:
        dist.recv(t(3), 0)
    raise RuntimeError(f"SURVIVOR {rank}: {sorted(texts)}")


def test_no_send_succeeds_to_a_rank_that_is_known_to_be_dead(backend):
    pool = RankPool(3, backend)
    with pytest.raises(RankFailure) as failure:
        pool.run(sends_to_the_dead_case)
    for survivor in (0, 2):
        assert re.search(rf"SURVIVOR {survivor}: \['rank 1 \(pid \d+\) has died'\]", str(failure.value)), failure.value


def sends_to_one_that_left_case():
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if dist.get_rank() == 1:
        return None
    text = str(raised(lambda: dist.send(torch.ones(3), group=group, group_dst=1), PeerLostError))
    return None if "rank 1 has left" in text else text


@pytest.mark.world_sizes(2)
def test_no_send_succeeds_to_a_rank_that_has_left(ranks):
    assert not any(found := ranks.run(sends_to_one_that_left_case)), found


def leaving_case():
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
        time.sleep(1)
        return None
    text = str(raised(lambda: dist.all_reduce(torch.ones(4), group=group), PeerLostError))
    return None if "rank 1 has left" in text else text


@pytest.mark.world_sizes(2)
def test_a_rank_that_left_is_named(ranks):
    assert not any(found := ranks.run(leaving_case)), found


def abort_case():
    group = dist.new_group()
    if dist.get_rank() == 0:
        threading.Timer(0.3, group.abort).start()
        error = raised(lambda: dist.all_reduce(torch.ones(4), group=group), AbortedError)
    else:
        error = raised(lambda: dist.recv(torch.ones(4), group=group, group_src=0), AbortedError)
    return None if error.seconds < HUNG else error.seconds


@pytest.mark.world_sizes(2)
def test_abort_releases_everyone(ranks):
    assert not any(found := ranks.run(abort_case)), found


def interrupt_case(kind):
    group = dist.new_group()
    if dist.get_rank() == 0:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        call = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(4), group=group),
            "recv": lambda: dist.recv(torch.ones(4), group=group, group_src=1),
        }[kind]
        error = raised(call, KeyboardInterrupt)
        return None if error.seconds < HUNG else error.seconds
    time.sleep(1.2)


@pytest.mark.world_sizes(2)
@pytest.mark.parametrize("kind", ["all_reduce", "recv"])
def test_ctrl_c_ends_a_blocking_call(ranks, kind):
    assert not any(found := ranks.run(interrupt_case, kind)), found


class FromHandler(Exception):
    pass


def handler_raises_case():
    def handler(*_):
        raise FromHandler

    group = dist.new_group()
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGUSR2, handler)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()
        error = raised(lambda: dist.all_reduce(torch.ones(4), group=group), FromHandler)
        signal.signal(signal.SIGUSR2, before)
        return None if error.seconds < HUNG else error.seconds
    time.sleep(1)


@pytest.mark.world_sizes(2)
def test_what_a_signal_handler_raises_comes_out_of_the_blocking_call(ranks):
    assert not any(found := ranks.run(handler_raises_case, timeout=20)), found


def destroyed_by_handler_case():
    group = dist.new_group()
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGUSR2, lambda *_: dist.destroy_process_group(group))
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR2)).start()
        opts = dist.AllreduceOptions()
        opts.asyncOp = False
        error = raised(lambda: group.allreduce([torch.ones(4)], opts), AbortedError)
        signal.signal(signal.SIGUSR2, before)
        return None if error.seconds < HUNG else error.seconds
    time.sleep(1)


@pytest.mark.world_sizes(2)
def test_a_signal_handler_may_destroy_the_group_it_interrupts(ranks):
    assert not any(found := ranks.run(destroyed_by_handler_case, timeout=20)), found


def elsewhere_case(change):
    """Rank 1 takes itself to be elsewhere, where there is no MPI either, in a group whose ranks do not know each other
    yet."""
    from unittest.mock import patch

    from c10d_custom.creation import topology

    here = topology.Location.here()
    kept, topology.Location.here = (
        topology.Location.here,
        lambda *_: topology.Location(**{**here.described(), **(change if dist.get_rank() == 1 else {})}),
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"elsewhere_case {change}", dist.distributed_c10d._get_default_store())
    try:
        with patch.dict(sys.modules, {"mpi4py": None} if dist.get_rank() == 1 else {}):
            return str(
                raised(lambda: build(NewGroup(store, rank, size, timedelta(seconds=60), "elsewhere")), TransportError)
            )
    finally:
        topology.Location.here = kept


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize(
    "change, said",
    [({"boot_id": "another", "hostname": "far"}, "far: rank 1: MPI needs mpi4py"), ({"uid": 12345}, "different users")],
)
def test_ranks_that_cannot_share_memory_are_told_so_everywhere(ranks, change, said):
    texts = ranks.run(elsewhere_case, change)
    assert all(said in t for t in texts), texts


def fork_case():
    import warnings

    warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is the point
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            dist.all_reduce(torch.ones(4))
            os.write(writer, b"no error")
        except UsageError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    t = torch.ones(4)
    dist.all_reduce(t)
    text = os.read(reader, 10000).decode()
    return None if "forked child" in text and t[0] == dist.get_world_size() else text


@pytest.mark.world_sizes(2)
def test_a_forked_child_cannot_use_its_parent_s_group(ranks):
    assert not any(found := ranks.run(fork_case)), found
