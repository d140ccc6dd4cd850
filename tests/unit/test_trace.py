"""The trace: what ranks remember of their calls, when it is written, and what the files say together."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CollectiveTimeoutError, CustomBackendError, PeerLostError
from c10d_custom.trace.file import Dump, GroupTrace, from_text, to_text
from c10d_custom.trace.report import report
from c10d_custom.transport.call_log import Peer, Record
from harness import RankFailure, RankPool
from harness.groups import group_with_timeout

pytestmark = pytest.mark.lane2

SECOND = timedelta(seconds=1)


@pytest.fixture(scope="module")
def _traced(tmp_path_factory):
    folder, pools = tmp_path_factory.mktemp("trace") / "traces", {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("C10D_CUSTOM_TRACE_DIR", str(folder))
        patch.setenv("C10D_CUSTOM_TRACE_SIGNAL", str(int(signal.SIGUSR2)))
        yield folder, pools
    wrong = [problem for problem in [pool.close() for pool in pools.values()] if problem]
    assert not wrong, wrong


@pytest.fixture
def traced(_traced, monkeypatch):
    """Pools whose ranks write traces to a folder, empty at first: (pool, folder) for a number of ranks, and of calls
    that they keep."""
    folder, pools = _traced
    shutil.rmtree(folder, ignore_errors=True)

    def make(ranks, calls=256):
        monkeypatch.setenv("C10D_CUSTOM_TRACE", str(calls))
        return pools.setdefault((ranks, calls), RankPool(ranks, "custom")), folder

    yield make
    if folder.is_file():
        folder.unlink()


def files(folder):
    return {d.rank: d for d in sorted((from_text(p.read_text()) for p in folder.iterdir()), key=lambda d: d.written)}


def own_calls(dump, group="0"):
    return next(g.calls for g in dump.groups if g.name == group)


def traces():
    return sorted(
        Path(os.environ["C10D_CUSTOM_TRACE_DIR"]).glob(f"*-{os.getpid()}-*"), key=lambda p: p.stat().st_mtime_ns
    )


def write_now():
    os.kill(os.getpid(), signal.SIGUSR2)
    return from_text(traces()[-1].read_text())


# --- the file


def example():
    call = Record(
        "all_reduce", 17, "SUM", "float32", "1024", 4096, 4096, -1, 0, "timed_out", 1.7e9, 1.7e9 + 1e-5, 1.7e9 + 2
    )
    message = Record("recv", 3, "-", "int8", "-", 0, 12, 1, 7, "waiting", 1.7e9 + 1, None, None)
    peers = [Peer(0, 11, "joined", 17, "all_reduce #17 SUM float32[1024]"), Peer(1, 12, "gone", 16, "-")]
    return Dump(
        4, 11, "hosta", 1.7e9 + 3, "PeerLostError: gone", [GroupTrace('a "b" c', 0, 2, [4, 6], peers, [call, message])]
    )


def test_a_file_is_read_as_it_was_written():
    assert from_text(to_text(example())) == example()


def test_a_file_that_was_cut_off_is_refused():
    text = to_text(example())
    with pytest.raises(ValueError, match="cut off"):
        from_text(text[: text.index("waiting")])


def test_each_call_and_each_rank_has_a_line():
    lines = to_text(example()).splitlines()
    for word in ("all_reduce", "recv"):
        assert sum(f'"operation": "{word}"' in line for line in lines) == 1
    assert sum('"pid": 12' in line for line in lines) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\nworld",
        "[]",
        '{"format": "c10d-custom trace 2"}',
        to_text(example()).replace("c10d-custom trace 2", "c10d-custom trace 1"),
        to_text(example()).replace("4096", "many"),
        to_text(example()).replace('"peers"', '"pears"'),
    ],
)
def test_what_is_no_trace_is_refused(text):
    with pytest.raises(ValueError):
        from_text(text)


# --- what is remembered


def remembered_case():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()
    name = group.group_name
    began = time.time()
    dist.all_reduce(torch.ones(10, dtype=torch.float64), dist.ReduceOp.MAX, group=group)
    dist.broadcast(torch.ones(1 << 18), src=1, group=group)
    dist.all_gather_into_tensor(torch.empty(3 * size), torch.ones(3), group=group)
    dist.barrier(group)
    work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
    work.wait()
    if rank < 2:
        requests = [
            dist.isend(torch.ones(1 << 18), 1 - rank, group=group, tag=5),
            dist.irecv(torch.ones(1 << 18), 1 - rank, group=group, tag=5),
        ]
        for request in requests:
            request.wait()
        never = dist.irecv(torch.ones(3, dtype=torch.int16), 1 - rank, group=group, tag=9)
    dump = write_now()
    dist.barrier()
    calls = own_calls(dump, name)
    if rank < 2:
        dist.send(torch.ones(3, dtype=torch.int16), 1 - rank, group=group, tag=9)
        never.wait()
    wrong = []
    collectives = [
        (c.operation, c.number, c.reduce, c.dtype, c.count, c.in_bytes, c.out_bytes, c.peer, c.state)
        for c in calls
        if not c.is_message
    ]
    expected = [
        ("all_reduce", 1, "MAX", "float64", "10", 80, 80, -1, "done"),
        ("broadcast", 2, "-", "float32", str(1 << 18), (1 << 20) * (rank == 1), (1 << 20) * (rank != 1), 1, "done"),
        ("all_gather", 3, "-", "float32", "3", 12, 12 * size, -1, "done"),
        ("barrier", 4, "-", "uint8", "0", 0, 0, -1, "done"),
        ("all_reduce", 5, "SUM", "float32", "5", 20, 20, -1, "done"),
    ]
    if collectives != expected:
        wrong.append(f"{collectives}")
    for c in calls:
        if not began - 0.1 <= c.issued <= (c.began or c.issued) <= (c.ended or time.time() + 0.1) <= time.time() + 0.1:
            wrong.append(f"times of {c}, began {began}")
    messages = sorted(
        (c.operation, c.in_bytes, c.out_bytes, c.peer, c.tag, c.state, c.began is None) for c in calls if c.is_message
    )
    expected = (
        []
        if rank > 1
        else [
            ("recv", 0, 6, 1 - rank, 9, "waiting", True),
            ("recv", 0, 1 << 20, 1 - rank, 5, "done", False),
            ("send", 1 << 20, 0, 1 - rank, 5, "done", False),
        ]
    )
    if messages != expected:
        wrong.append(f"{messages}")
    group_trace = next(g for g in dump.groups if g.name == name)
    if [p.state for p in group_trace.peers] != ["joined"] * size or group_trace.peers[rank].entered != 5:
        wrong.append(f"{group_trace.peers}")
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_is_remembered_with_what_it_was(traced, size):
    pool, folder = traced(size)
    assert not any(found := pool.run(remembered_case)), found
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def last_calls_case(kept):
    group = dist.new_group()
    for i in range(20):
        dist.all_reduce(torch.ones(i), group=group)
    calls = [(c.number, c.count) for c in own_calls(write_now(), group.group_name)]
    return [] if len(calls) == kept and calls == [(n, str(n - 1)) for n in range(21 - kept, 21)] else calls


def test_the_last_calls_are_kept(traced):
    pool, _ = traced(2, 3)
    assert not any(found := pool.run(last_calls_case, 3)), found


def queued_case():
    """More calls under way than are kept: the one that runs, and all behind it, are there nevertheless."""
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
    works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(9)]
    wrong = []
    if dist.get_rank() == 0:
        time.sleep(0.1)
        calls = [(c.number, c.state) for c in own_calls(write_now(), group.group_name)]
        if calls != [(1, "running")] + [(n, "queued") for n in range(2, 10)]:
            wrong = calls
        dist.send(torch.ones(1), 1)
    for work in works:
        work.wait()
    return wrong


def test_calls_under_way_are_not_pushed_out_by_queued_ones(traced):
    pool, _ = traced(2, 3)
    assert not any(found := pool.run(queued_case)), found


# --- when it is written, and what the files say


def late_case():
    rank = dist.get_rank()
    group = group_with_timeout(SECOND)
    dist.barrier(group)
    if rank == 2:
        time.sleep(1.5)
        return str(write_now().reason)
    with pytest.raises(CollectiveTimeoutError) as first:
        dist.all_reduce(torch.ones(1000), group=group)
    with pytest.raises(CustomBackendError) as second:
        dist.all_reduce(torch.ones(1000), group=group)
    assert not hasattr(second.value, "__notes__")  # written once
    return first.value.__notes__, [str(p) for p in traces()]


def test_a_failure_is_written_once_and_names_the_rank_that_holds_up_the_others(traced):
    pool, folder = traced(3)
    answers = pool.run(late_case)
    for notes, paths in answers[:2]:
        assert len(paths) == 1 and len(notes) == 1 and paths[0] in notes[0]
    text = "\n".join(report(files(folder).values()))
    assert "ranks 0, 1 for rank 2: all_reduce #2 of group" in text
    assert "rank 2 waits for nobody here, and holds up ranks 0, 1" in text
    assert "ranks 0, 1: inside #2: all_reduce SUM float32[1000]" in text and "rank 2: past #1: barrier" in text
    command = subprocess.run(
        [sys.executable, "-m", "c10d_custom", "trace", *map(str, folder.iterdir())],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert command.returncode == 0 and command.stdout == text + "\n", command.stderr


def stuck_case():
    rank = dist.get_rank()
    group = dist.new_group()
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if rank == 0:
        dist.barrier(group)  # waits for rank 1, which first has our trace written
        return None
    time.sleep(0.3)
    os.kill(int(pids[0]), signal.SIGUSR2)
    folder, until = Path(os.environ["C10D_CUSTOM_TRACE_DIR"]), time.monotonic() + 10
    while (
        not (found := [p for p in folder.glob("*rank0*") if p.read_text().endswith("]}\n")])
        and time.monotonic() < until
    ):
        time.sleep(0.01)
    dist.barrier(group)
    return from_text(found[0].read_text()), group.group_name


def test_a_signal_writes_the_trace_of_a_rank_that_waits_and_it_goes_on(traced):
    pool, _ = traced(2)
    dump, group = pool.run(stuck_case)[1]
    last = own_calls(dump, group)[-1]
    assert (last.operation, last.number, last.state, last.ended) == ("barrier", 1, "running", None)
    assert dump.reason == f"signal {int(signal.SIGUSR2)}"


def crossed_case():
    groups = [group_with_timeout(SECOND) for _ in range(2)]
    with pytest.raises(CustomBackendError):
        dist.barrier(groups[dist.get_rank()])


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_circle(traced):
    pool, folder = traced(2)
    pool.run(crossed_case)
    assert "circle: rank 0 waits for rank 1 waits for rank 0" in "\n".join(report(files(folder).values()))


def unsent_case():
    rank = dist.get_rank()
    group = group_with_timeout(SECOND)
    if rank == 1:
        with pytest.raises(CustomBackendError):
            dist.recv(torch.empty(4), 2, group=group, tag=3)
    elif rank == 0:
        with pytest.raises(CustomBackendError):
            dist.recv(torch.empty(4), 1, group=group)
    else:
        write_now()


def test_a_receive_waits_for_its_sender(traced):
    pool, folder = traced(3)
    pool.run(unsent_case)
    text = "\n".join(report(files(folder).values()))
    assert "rank 1 for rank 2: recv of 16 bytes of float32 from rank 2, tag 3" in text
    assert "rank 2 waits for nobody here, and holds up ranks 0, 1" in text


def killed_case():
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.barrier(group)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(group)
    with pytest.raises(PeerLostError) as caught:
        dist.all_reduce(torch.ones(10), group=group)
    return str(caught.value)


def test_a_rank_that_was_killed_is_told_from_the_others_files(traced):
    pool, folder = traced(3)
    with pytest.raises(RankFailure):
        pool.run(killed_case)
    dumps = files(folder)
    assert set(dumps) == {0, 2}
    text = "\n".join(report(dumps.values()))
    assert "rank 1: no file; seen by the others: pid" in text and "its process is gone, entered 1 collectives" in text
    assert "rank 1 waits for nobody here, and holds up ranks 0, 2" in text


def mismatch_case():
    group = dist.new_group()
    with pytest.raises(CustomBackendError):
        dist.all_reduce(torch.ones(10 + dist.get_rank()), group=group)


def test_what_was_not_called_alike_is_shown(traced):
    pool, folder = traced(2)
    pool.run(mismatch_case)
    text = "\n".join(report(files(folder).values()))
    assert "#1 was not called alike: rank 0: all_reduce SUM float32[10]; rank 1: all_reduce SUM float32[11]" in text


def unwritable_case():
    group = group_with_timeout(SECOND)
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.barrier(group)
        return caught.value.__notes__
    return []


def test_a_folder_that_cannot_be_written_does_not_hide_the_failure(traced, monkeypatch):
    pool, folder = traced(2)
    folder.write_text("a file, not a folder")
    assert ["could not be written" in note for note in pool.run(unwritable_case)[0]] == [True]


def silent_case():
    group = group_with_timeout(SECOND)
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.barrier(group)
        return getattr(caught.value, "__notes__", []), signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    return [], True


def test_nothing_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("C10D_CUSTOM_TRACE_DIR", "C10D_CUSTOM_TRACE_SIGNAL"):
        monkeypatch.delenv(name, raising=False)
    pool = RankPool(2, "custom")
    assert pool.run(silent_case) == [([], True)] * 2
    assert pool.close() is None and not list(tmp_path.iterdir())


def test_the_signal_needs_a_folder(monkeypatch):
    from c10d_custom.config import Config

    monkeypatch.delenv("C10D_CUSTOM_TRACE_DIR", raising=False)
    monkeypatch.setenv("C10D_CUSTOM_TRACE_SIGNAL", "10")
    with pytest.raises(ValueError, match="C10D_CUSTOM_TRACE_DIR"):
        Config.from_env()
    monkeypatch.setenv("C10D_CUSTOM_TRACE_DIR", "/somewhere")
    assert Config.from_env().trace_signal == 10
    monkeypatch.setenv("C10D_CUSTOM_TRACE_SIGNAL", "9")
    with pytest.raises(ValueError, match="no signal"):
        Config.from_env()
