"""The trace in the Flight Recorder's format: torch's own analyzer reads it, and says what ours says."""

import importlib.util
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import CustomBackendError
from c10d_custom.trace.file import from_text
from c10d_custom.trace.report import report
from harness import RankPool
from harness.groups import group_with_timeout

pytestmark = pytest.mark.lane2

SECOND = timedelta(seconds=1)
ANALYZER = "torch.distributed.flight_recorder.fr_trace"
KEPT = 40  # calls that the ranks of `remembering` remember


def analyzer_there():
    try:
        return importlib.util.find_spec(ANALYZER) is not None
    except ModuleNotFoundError:
        return False


needs_analyzer = pytest.mark.skipif(not analyzer_there(), reason=f"this torch has no {ANALYZER}")


def pool_fixture(**variables):
    """A pool of 3 ranks that write both kinds of files, and the folder that they write to, empty at first."""

    @pytest.fixture(scope="module")
    def started(tmp_path_factory):
        folder = tmp_path_factory.mktemp("recorder")
        environment = {
            "C10D_CUSTOM_TRACE_DIR": str(folder / "ours"),
            "C10D_CUSTOM_TRACE_SIGNAL": str(int(signal.SIGUSR2)),
            "TORCH_FR_DUMP_TEMP_FILE": str(folder / "torchs" / "rank_"),
        }
        pool = RankPool(3, "custom", environment={**environment, **variables})
        yield pool, folder
        assert not (problem := pool.close()), problem

    return started


plain_pool = pool_fixture()
remembering_pool = pool_fixture(C10D_CUSTOM_TRACE_FRAMES="1", C10D_CUSTOM_TRACE=str(KEPT))


def emptied(pool_and_folder):
    pool, folder = pool_and_folder
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return pool, folder


@pytest.fixture
def plain(plain_pool):
    return emptied(plain_pool)


@pytest.fixture
def remembering(remembering_pool):
    return emptied(remembering_pool)


def torch_says(folder, *options):
    done = subprocess.run(
        [sys.executable, "-m", ANALYZER, str(folder / "torchs"), "--prefix", "rank_", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def we_say(folder):
    return "\n".join(report(from_text(path.read_text()) for path in (folder / "ours").iterdir()))


def entries(folder, rank):
    """Of a file that our own ranks have written."""
    return pickle.loads((folder / "torchs" / f"rank_{rank}").read_bytes())["entries"]


def culprits(said):
    return {int(rank) for rank in re.findall(r"Culprit rank (\d+)", said)}


@contextmanager
def new_group(timeout=SECOND):
    """One that no later dump has. ``timeout``: of its calls."""
    group = group_with_timeout(timeout)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def fails(call):
    with pytest.raises(CustomBackendError) as caught:
        call()
    return caught.value


# --- stuck jobs, as both analyzers see them


def absent_case(comes_late):
    with new_group() as group:
        dist.all_reduce(torch.ones(3), group=group)
        if dist.get_rank() == 2:
            time.sleep(1.6)
            if not comes_late:
                os.kill(os.getpid(), signal.SIGUSR2)
                return
        fails(lambda: dist.all_reduce(torch.ones(1000), group=group))


@needs_analyzer
@pytest.mark.parametrize("comes_late", [False, True])
def test_a_rank_that_does_not_come_is_missing(plain, comes_late):
    pool, folder = plain
    pool.run(absent_case, comes_late)
    said = torch_says(folder)
    assert "Not all ranks joining collective, sequence number: 2" in said, said
    assert "collective: nccl:all_reduce" in said and "missing ranks: {2}" in said and "[[1000]]" in said, said
    assert said.count("Not all ranks") == 1 and not culprits(said), said
    if not comes_late:
        assert "rank 2 waits for nobody here, and holds up ranks 0, 1" in we_say(folder)


def other_call_case():
    tensor = torch.ones(1000)
    with new_group() as group:
        if dist.get_rank() == 1:
            fails(lambda: dist.broadcast(tensor, 0, group=group))
        else:
            fails(lambda: dist.all_reduce(tensor, group=group))


@needs_analyzer
def test_a_rank_that_calls_something_else_is_named(plain):
    pool, folder = plain
    pool.run(other_call_case)
    said = torch_says(folder)
    assert "Collective sequence number: 1 has errors" in said and "COLLECTIVE_TYPE_MISMATCH" in said, said
    assert "'all_reduce'" in said and "'broadcast'" in said, said
    # It takes whichever file the folder lists first for the right one.
    assert culprits(said) == ({0, 2} if "Expected collective type: 'broadcast'" in said else {1}), said
    ours = we_say(folder)
    assert "#1 was not called alike: ranks 0, 2: all_reduce SUM float32[1000]; rank 1: broadcast" in ours, ours


def other_size_case():
    with new_group() as group:
        fails(lambda: dist.all_reduce(torch.ones(1000 + (dist.get_rank() == 1)), group=group))


@needs_analyzer
def test_a_rank_with_another_size_is_named(plain):
    pool, folder = plain
    pool.run(other_size_case)
    said = torch_says(folder)
    assert "SIZE_OR_SYNTAX_MISMATCH" in said and "'[[1000]]'" in said and "'[[1001]]'" in said, said
    assert culprits(said) == ({0, 2} if "Expected input sizes: '[[1001]]'" in said else {1}), said
    assert "ranks 0, 2: all_reduce SUM float32[1000]; rank 1: all_reduce SUM float32[1001]" in we_say(folder)


def unsent_case():
    with new_group() as group:
        if dist.get_rank() == 2:
            fails(lambda: dist.recv(torch.empty(4), 0, group=group, tag=3))
        else:
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGUSR2)


@needs_analyzer
def test_a_message_that_is_not_sent_is_missing(plain):
    pool, folder = plain
    pool.run(unsent_case)
    said = torch_says(folder)
    assert "missing ranks: {0}" in said and "rank 0 to rank 2, tag 3" in said, said
    assert said.count("missing ranks") == 1, said


def healthy_case():
    """Every operation, and as many calls as make the ranks forget some."""
    rank, size = dist.get_rank(), 3
    with new_group(60 * SECOND) as group:
        for _ in range(KEPT):
            dist.all_reduce(torch.ones(10), group=group)
        parts = [torch.ones(r + 1) for r in range(size)]
        dist.all_gather([torch.empty(2) for _ in range(size)], torch.ones(2), group=group)
        dist.all_gather([torch.empty_like(p) for p in parts], parts[rank], group=group)
        dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(size)], group=group)
        dist.reduce_scatter(torch.empty_like(parts[rank]), parts, group=group)
        dist.broadcast(torch.ones(5), 1, group=group)
        dist.reduce(torch.ones(5), 1, group=group)
        lists = [torch.empty(2) for _ in range(size)] if rank == 1 else None
        dist.gather(torch.ones(2), lists, 1, group=group)
        dist.scatter(torch.ones(2), lists, 1, group=group)
        dist.all_to_all_single(torch.empty(3), torch.ones(3), group=group)
        dist.all_to_all([torch.empty(rank + 1) for _ in range(size)], parts, group=group)
        work = dist.all_reduce(torch.ones(7, dtype=torch.float64), group=group, async_op=True)
        work.wait()
        if rank < 2:
            request = dist.isend(torch.ones(1 << 18), 1 - rank, group=group)
            dist.recv(torch.empty(1 << 18), 1 - rank, group=group)
            request.wait()
        dist.barrier(group)
        dist.barrier(group)
        os.kill(os.getpid(), signal.SIGUSR2)


@needs_analyzer
def test_a_job_in_which_all_is_well_has_no_culprit(remembering):
    pool, folder = remembering
    pool.run(healthy_case)
    said = torch_says(folder)
    assert not culprits(said) and "Not all ranks" not in said and "mismatch" not in said, said
    operations = {entry["profiling_name"] for entry in entries(folder, 0)}
    assert len(operations) == 11, operations


# --- the files


def frames_case():
    with new_group() as group:
        dist.all_reduce(torch.ones(3), group=group)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        work.wait()
        if dist.get_rank() == 2:
            time.sleep(1.2)
            return []
        return fails(lambda: dist.barrier(group)).__notes__


def named(entry):
    return [frame["name"] for frame in entry["frames"]]


def test_the_failed_call_s_place_is_known(plain):
    pool, folder = plain
    notes = pool.run(frames_case)[0]
    path = folder / "torchs" / "rank_0"
    assert any("torchfrtrace" in note and str(path) in note for note in notes), notes
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sorted(p.name for p in path.parent.iterdir()) == ["rank_0", "rank_1"]
    found = [named(entry) for entry in entries(folder, 0)]
    assert found[-1][:3] == ["<lambda>", "fails", "frames_case"] and not any(found[:-1]), found


def waiting_case(path):
    """Rank 1 has the file of rank 0 written, which waits for it."""
    with new_group(60 * SECOND) as group:
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        dist.all_gather(pids, torch.tensor([os.getpid()]), group=group)
        if dist.get_rank() == 1:
            time.sleep(0.3)
            os.kill(int(pids[0]), signal.SIGUSR2)
            until = time.monotonic() + 20
            while not path.exists() and time.monotonic() < until:
                time.sleep(0.01)
        dist.barrier(group)


def test_a_signal_tells_where_a_rank_waits(plain):
    pool, folder = plain
    pool.run(waiting_case, folder / "torchs" / "rank_0")
    last = entries(folder, 0)[-1]
    assert (last["profiling_name"], last["state"], last["retired"]) == ("nccl:barrier", "started", False)
    assert named(last)[0] == "waiting_case"


def test_every_call_s_place_is_known_where_asked_for(remembering):
    pool, folder = remembering
    pool.run(frames_case)
    found = entries(folder, 0)[-3:]
    assert [named(entry)[0] for entry in found] == ["frames_case", "frames_case", "<lambda>"], found
    assert [entry["frames"][0]["filename"] for entry in found] == [__file__] * 3
    lines = [entry["frames"][0]["line"] for entry in found]
    assert lines == sorted(set(lines))


def unwritable_case():
    with new_group() as group:
        if dist.get_rank() == 2:
            time.sleep(1.2)
            return []
        return fails(lambda: dist.barrier(group)).__notes__


def test_a_file_that_cannot_be_written_does_not_hide_the_failure(plain):
    pool, folder = plain
    (folder / "torchs").write_text("a file, not a folder")
    notes = pool.run(unwritable_case)[0]
    assert [("FR" in note, "could not be written" in note) for note in notes] == [(False, False), (True, True)], notes
