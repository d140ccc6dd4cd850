"""Signal handlers that raise amid a call, as Ctrl-C's does, or call the group they interrupt. On one host and, with
--job, over hosts.

Contract (transport/__init__.py): an exception that leaves a wait has withdrawn the operation, or has ended the group
with an error on both sides; the caller's tensor is the caller's again. A handler that calls the group amid a collective
gets an error at once, and the collective goes on."""

import contextlib
import random
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from c10d_custom.errors import AbortedError, CustomBackendError, UsageError
from ecosystem.spawn import run
from harness import Layout
from harness.groups import group_with_timeout

LARGE = 4_000_000  # floats: no message of this size fits into what a rank may send ahead
SECONDS = timedelta(seconds=15)


class Alarm(Exception):
    pass


@contextlib.contextmanager
def handler_after(seconds, handler):
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def alarm(*_):
    raise Alarm


def interrupted(seconds, call):
    """Whether a handler that raises after so many seconds ended the call. Errors of ours are let through."""
    try:
        with handler_after(seconds, alarm):
            call()
    except Alarm:
        return True
    return False


def send_and_reuse(rank, size):
    """The receiver gets no byte that the sender wrote after its call had raised."""
    group, other = dist.new_group(timeout=SECONDS), dist.new_group(timeout=SECONDS)
    t, raised = torch.full((LARGE,), 1.0), torch.zeros(1)
    try:
        if rank == 0:
            raised += interrupted(0.2, lambda: dist.send(t, 1, group))
            t.fill_(2.0)
        dist.broadcast(raised, 0, other)
        # An MPI may take as much in before anybody receives it: then the call is over before the handler comes.
        assert raised.item() or Layout.chosen()
        if rank == 0:
            dist.send(torch.full((LARGE,), 3.0), 1, group)
        else:
            if not raised.item():
                dist.recv(t, 0, group)
                assert torch.equal(t, torch.full_like(t, 1.0)), t.unique()
            dist.recv(t, 0, group)
            assert torch.equal(t, torch.full_like(t, 3.0)), t.unique()
        outcome = "the next message"
    except CustomBackendError as error:
        assert "aborted" in str(error), error
        outcome = "aborted"
    dist.barrier(other)
    dist.destroy_process_group(group)
    return outcome


def test_a_send_that_an_exception_leaves_sends_nothing():
    outcomes = set(run(send_and_reuse, 2))
    assert len(outcomes) == 1, outcomes


def receive_and_reuse(rank, size):
    """The next message goes to its own receive, and not to the tensor of one that has raised."""
    group, other = dist.new_group(timeout=SECONDS), dist.new_group(timeout=SECONDS)
    for count in (3, LARGE):
        if rank == 0:
            dist.barrier(other)
            dist.send(torch.full((count,), 5.0), 1, group)
        else:
            left, t = torch.zeros(count), torch.zeros(count)
            assert interrupted(0.15, lambda: dist.recv(left, 0, group))
            left.fill_(7.0)
            dist.barrier(other)
            dist.recv(t, 0, group)
            assert t.unique().tolist() == [5.0] and left.unique().tolist() == [7.0]
        dist.barrier(other)
    dist.destroy_process_group(group)


def test_a_receive_that_an_exception_leaves_receives_nothing():
    run(receive_and_reuse, 2)


def at_any_moment(rank, size, seed, trials):
    """Handlers that raise at random points of a transfer: what arrives is all of one message, or an error."""
    chance, other = random.Random(seed), dist.new_group(timeout=SECONDS)
    outcomes = {}
    for trial in range(trials):
        # All that the other waits for who was interrupted before it had posted.
        group = group_with_timeout(SECONDS / 5)
        delay, who = chance.uniform(1e-4, 8e-3), chance.randrange(2)
        t = torch.full((LARGE,), 1.0 if rank == 0 else 0.0)
        call = (lambda: dist.send(t, 1, group)) if rank == 0 else (lambda: dist.recv(t, 0, group))
        raised, error = False, None
        try:
            if rank == who:
                raised = interrupted(delay, call)
                if raised:
                    t.fill_(9.0)
            else:
                call()
        except CustomBackendError as found:
            error = found
        if rank == who and raised:
            outcome = "raised"
        else:
            outcome = "error" if error else "arrived"
            if error is None and rank == 1:
                assert t.unique().tolist() == [1.0], (trial, t.unique())
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        dist.barrier(other)
        if raised:
            time.sleep(0.01)
            assert t.unique().tolist() == [9.0], trial
        dist.destroy_process_group(group)
    return outcomes


def test_at_any_moment_of_a_transfer():
    for outcomes in run(at_any_moment, 2, 2026, 40):
        assert sum(outcomes.values()) == 40


def batch_and_reuse(rank, size):
    """Of a batch, what has not ended is withdrawn one by one, as its Works are waited for."""
    group, other = dist.new_group(timeout=SECONDS), dist.new_group(timeout=SECONDS)
    if rank == 1:
        left = [torch.zeros(LARGE) for _ in range(3)]
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, 0, group, tag=i) for i, t in enumerate(left)])
        for work in works:
            assert interrupted(0.05, work.wait)
            said = _error(work.wait)  # not that the group was aborted
            assert "taken back: call it again. The group goes on." in said, said
        for t in left:
            t.fill_(7.0)
        dist.barrier(other)
        t = torch.zeros(LARGE)
        for i in range(3):
            dist.recv(t, 0, group, tag=i)
            assert t.unique().tolist() == [5.0 + i]
        assert all(t.unique().tolist() == [7.0] for t in left)
        assert all(w.is_completed() and not w.is_success() for w in works)
    else:
        dist.barrier(other)
        for i in range(3):
            dist.send(torch.full((LARGE,), 5.0 + i), 1, group, tag=i)
    dist.destroy_process_group(group)


def test_messages_of_a_batch():
    run(batch_and_reuse, 2)


def queued(rank, size):
    """A collective that waits behind another, left by an exception: the group ends, on both sides, and says so."""
    group, other = dist.new_group(timeout=SECONDS), dist.new_group(timeout=SECONDS)
    t, u = torch.ones(3), torch.ones(3)
    if rank == 0:
        first = dist.all_reduce(t, group=group, async_op=True)
        assert interrupted(0.2, lambda: dist.all_reduce(u, group=group))
        t.fill_(9.0), u.fill_(9.0)
        dist.barrier(other)
        time.sleep(0.05)
        assert t.tolist() == u.tolist() == [9.0] * 3 and first.is_completed()
        errors = [_error(lambda: dist.all_reduce(t, group=group))]
    else:
        dist.barrier(other)
        errors = [_error(lambda: dist.all_reduce(t, group=group))]
        if errors == [None]:  # what rank 0 had sent for its first call was here before the news
            assert t.tolist() == [2.0] * 3
            errors = [_error(lambda: dist.all_reduce(t, group=group))]
    dist.barrier(other)
    dist.destroy_process_group(group)
    return errors


def _error(call):
    try:
        call()
    except CustomBackendError as error:
        return str(error)
    return None


def test_a_collective_behind_another():
    for errors in run(queued, 2):
        assert all(e and "abort" in e for e in errors), errors


def collectives_and_reuse(rank, size):
    """A large collective left by an exception: nothing more comes into the tensors, and what MPI may still write to is
    not freed."""
    other, wrong = dist.new_group(timeout=SECONDS * 4), []
    count = LARGE * 4 // size
    parts = [torch.ones(count) for _ in range(size)]
    calls = {
        "all_gather": lambda t, out, g: dist.all_gather(out, t, group=g),
        "all_to_all": lambda t, out, g: dist.all_to_all(out, parts, group=g),
        "reduce_scatter": lambda t, out, g: dist.reduce_scatter(t, parts, group=g),
        "broadcast": lambda t, out, g: dist.broadcast(t, size - 1, group=g),
        "gather": lambda t, out, g: dist.gather(t, out if rank == 0 else None, 0, group=g),
        "scatter": lambda t, out, g: dist.scatter(t, parts if rank == size - 1 else None, size - 1, group=g),
    }
    for delay in (0.005, 0.02):
        for name, call in calls.items():
            t, out = torch.ones(count), [torch.zeros(count) for _ in range(size)]
            dist.barrier(other)
            # The time-out is what the others wait for who was interrupted before it had called.
            group = group_with_timeout(SECONDS / 5)
            dist.barrier(other)
            if rank == 0:
                raised = interrupted(delay, lambda: call(t, out, group))
                mine = [t, *out]
                for tensor in mine:
                    tensor.fill_(7.0)
            else:
                _error(lambda: call(t, out, group))
                del t, out
            for _ in range(5):  # MPI gets on with what is under way
                time.sleep(0.02)
                dist.barrier(other)
            if rank == 0 and raised and not all(x.unique().tolist() == [7.0] for x in mine):
                wrong.append((name, delay))
            dist.destroy_process_group(group)
    return wrong


def test_collectives_left_by_an_exception():
    for wrong in run(collectives_and_reuse, 4 if Layout.chosen() else 2, deadline=240):
        assert not wrong, wrong


def told_why(rank, size):
    """What the other ranks are told of a collective that an exception has left."""
    other, t, told = dist.new_group(timeout=SECONDS), torch.ones(3), []
    for call in (
        lambda group: dist.all_reduce(t, group=group),
        lambda group: dist.all_reduce(t, group=group, async_op=True).wait(),
        lambda group: dist.all_reduce(t, group=group, async_op=True).wait(SECONDS),  # the wait itself runs nothing
    ):
        group = dist.new_group(timeout=SECONDS)
        if rank == 0:
            assert interrupted(0.1, lambda: call(group))
        dist.barrier(other)
        told += [str(_error(lambda: call(group))) for _ in range(2)]
        dist.destroy_process_group(group)
    return told


def test_the_other_ranks_are_told_that_a_handler_raised():
    for rank, told in enumerate(run(told_why, 4 if Layout.chosen() else 2)):
        assert len(told) == 6
        for text in told:
            assert "signal handler" in text and "raised" in text, told
            assert rank == 0 or "on rank 0" in text, told


def on_top(rank, size):
    """What a handler gets that calls the group amid one of its collectives; and that the collective is right all the
    same."""
    group, other, small = dist.new_group(timeout=SECONDS), dist.new_group(timeout=SECONDS), torch.ones(2)
    store = dist.distributed_c10d._get_default_store()
    calls = {
        "all_reduce": lambda: dist.all_reduce(small, group=group),
        "all_reduce, large": lambda: dist.all_reduce(torch.ones(LARGE), group=group),
        "async": lambda: dist.all_reduce(small, group=group, async_op=True).wait(),
        "barrier": lambda: dist.barrier(group),
        "broadcast": lambda: dist.broadcast(small, 0, group),
        "objects": lambda: dist.all_gather_object([None] * size, rank, group),
    }
    outers = {
        "barrier": lambda t: dist.barrier(group),
        "small": lambda t: dist.all_reduce(t, group=group),
        "large": lambda t: dist.all_reduce(t, group=group),
        "gather": lambda t: dist.all_gather([torch.empty_like(t) for _ in range(size)], t, group=group),
    }
    found = []
    for outer_name, outer in outers.items():
        for name, call in calls.items():
            got = []

            def handler(*_):
                began = time.monotonic()
                try:
                    call()
                    got.append("nothing")
                except UsageError as error:
                    got.append(str(error))
                got.append(time.monotonic() - began)
                store.set(f"{outer_name} under {name}", "")

            t = torch.full((LARGE if outer_name == "large" else 3,), float(rank + 1))
            dist.barrier(other)
            if rank == 0:
                with handler_after(0.1, handler):
                    outer(t)
                found.append((outer_name, name, *got))
            else:
                store.wait([f"{outer_name} under {name}"], SECONDS)  # until then the outer one cannot end
                outer(t)
            if outer_name in ("small", "large"):
                assert t.unique().tolist() == [float(sum(range(1, size + 1)))]
    dist.all_reduce(small, group=group)  # the ranks still count alike
    assert small.tolist() == [float(size)] * 2
    dist.destroy_process_group(group)
    return found


def test_a_handler_that_calls_the_group_it_interrupts():
    for name in run(on_top, 2, deadline=90)[0]:
        outer, inner, error, seconds = name
        assert "amid" in error and "#" in error and "another group" in error, name
        assert seconds < SECONDS.total_seconds() - 1, name  # it has not waited for the time-out


def other_groups(rank, size):
    """A handler may use other groups, and send messages on this one."""
    group, other, got = dist.new_group(timeout=SECONDS), dist.new_group(timeout=SECONDS), []
    ready = dist.new_group(timeout=SECONDS)

    def handler(*_):
        t = torch.full((3,), float(rank + 1))
        dist.all_reduce(t, group=other)
        dist.send(t, 1, group)
        got.append(t.tolist())

    dist.barrier(ready)
    if rank == 0:
        with handler_after(0.1, handler):
            dist.barrier(group)
    else:
        time.sleep(0.2)
        t = torch.full((3,), float(rank + 1))
        dist.all_reduce(t, group=other)
        dist.recv(t, 0, group)
        got.append(t.tolist())
        dist.barrier(group)
    assert got == [[3.0] * 3]
    dist.destroy_process_group(group)


def test_a_handler_may_use_other_groups_and_messages():
    run(other_groups, 2)


def wait_again(rank, size):
    """The handler's exception leaves one wait. What the Work, its future and later waits say is an error of ours, which
    `except Exception` catches."""
    group, other = dist.new_group(timeout=SECONDS), dist.new_group(timeout=SECONDS)
    for from_future in (False, True):
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
            future = work.get_future() if from_future else None
            assert interrupted(0.2, work.wait)
            for ask in (work.wait, work.wait, *([future.wait] if future else [])):
                try:
                    ask()
                    raise AssertionError("went well")
                except RuntimeError as error:
                    assert "aborted" in str(error), error
            assert isinstance(work.exception(), AbortedError) and isinstance(work.exception().__cause__, Alarm)
        dist.barrier(other)
        dist.destroy_process_group(group)
        group = dist.new_group(timeout=SECONDS)


def test_the_error_of_a_handler_leaves_one_wait_only():
    run(wait_again, 2)
