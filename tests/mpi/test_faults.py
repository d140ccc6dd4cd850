"""What the ranks of other hosts are told when ranks disagree, are late, die, leave or are cut off."""
import json
import threading
import time
from pathlib import Path

import pytest

from harness import Layout
from harness.job import rig_of
from programs.launch import start

FAULT = Path(__file__).with_name("scripts") / "fault.py"
BOTH = ["2+2", pytest.param("3+1", marks=pytest.mark.full("each takes some 8 s; others here have this layout"))]
# So that the launcher does not end the job before the survivors have said what they saw.
SURVIVE = {"mpich": ["-disable-auto-cleanup"], "openmpi": ["--with-ft", "ulfm"]}


def said(kind, layout, folder):
    layout = Layout.parse(layout)
    if reason := layout.why_not():
        pytest.skip(reason)
    try:
        result = start([FAULT, kind, folder], layout=layout, address=False, flags=SURVIVE[layout.mpi], deadline=40)
    except AssertionError as error:
        stacks = [f"{p.name}:\n{p.read_text()}" for p in sorted(folder.glob("*.stacks"))]
        raise AssertionError("\n".join([str(error), *stacks])) from None
    return result, read(folder)


def read(folder):
    return {value["rank"]: value for value in (json.loads(p.read_text()) for p in folder.glob("*.json"))}


@pytest.mark.parametrize("layout, kind, lost", [
    ("2+2", "killed idle", 3), ("2+2", "killed small", 3), ("2+2", "killed leader", 2),
    ("3+1", "killed large", 3), ("3+1", "killed first", 0), ("2+2", "message", 3),
    ("openmpi:2+2", "killed small", 3),
    pytest.param("openmpi:2+2", "killed large", 3, marks=pytest.mark.full("Open MPI's launcher ends the job as in the one above"))])
def test_a_rank_that_dies_is_named_on_the_other_hosts(kind, lost, layout, tmp_path):
    result, ranks = said(kind, layout, tmp_path)
    # Those of the other host, that is: MPICH's launcher was seen to end the dead rank's host even so.
    first = Layout.parse(layout).ranks_per_host[0]
    lost_host, others = (set(range(first, 4)), set(range(first))) if lost >= first else \
        (set(range(first)), set(range(first, 4)))
    assert others <= set(ranks) <= set(range(4)) - {lost}, str(result)
    # A rank that was ended with its host before it could speak may be named instead: it is gone as well.
    gone = lost_host - set(ranks)
    host = "hostb" if lost >= first else "hosta"
    for rank, value in ranks.items():
        assert value["error"] == "PeerLostError", str(result)
        assert any(f"rank {other} on {host}" in value["text"] for other in gone), value
        assert value["seconds"] < 2.8, value  # up to 0.8 of them before it died


@pytest.mark.parametrize("layout, kind", [
    ("2+2", "count"), ("2+2", "small and large"), ("3+1", "small and large"), ("3+1", "dtype"), ("2+2", "redop"),
    ("3+1", "operation"), ("2+2", "small and medium"), ("2+2", "medium and large"), ("2+2", "medium"),
    ("2+2", "operation, medium"), ("openmpi:2+2", "redop")])
def test_ranks_that_disagree_are_shown_side_by_side(kind, layout, tmp_path):
    result, ranks = said(kind, layout, tmp_path)
    assert sorted(ranks) == [0, 1, 2, 3], str(result)
    for value in ranks.values():
        assert value["error"] == "CollectiveMismatchError" and value["seconds"] < 2.0, str(result)
        assert all(f"rank {r}: " in value["text"] for r in range(4)), value
        assert "has not called yet" not in value["text"], value


@pytest.mark.parametrize("layout", BOTH)
def test_a_refused_call_does_not_keep_the_others_waiting(layout, tmp_path):
    result, ranks = said("refused", layout, tmp_path)
    assert ranks[3]["error"] == "UsageError", str(result)
    for rank in range(3):
        assert ranks[rank]["error"] in ("CollectiveMismatchError", "PeerLostError"), str(result)
        assert ranks[rank]["seconds"] < 2.5, str(result)


@pytest.mark.parametrize("layout", BOTH)
def test_a_group_in_which_all_refused_a_call_goes_on(layout, tmp_path):
    result, ranks = said("all refused", layout, tmp_path)
    assert [ranks[r]["error"] for r in range(4)] == ["UsageError"] * 4, str(result)


@pytest.mark.parametrize("layout, kind", [("2+2", "late"), ("2+2", "stopped"), ("3+1", "late, large")])
def test_a_rank_that_does_not_come_is_named(kind, layout, tmp_path):
    result, ranks = said(kind, layout, tmp_path)
    for rank in range(3):
        assert ranks[rank]["error"] == "CollectiveTimeoutError", str(result)
        assert "rank 3 on hostb" in ranks[rank]["text"] and ranks[rank]["seconds"] < 5.5, str(result)
    if kind != "stopped":   # which the launcher may end meanwhile, seeing the others go
        assert ranks[3]["error"] is not None, str(result)


@pytest.mark.parametrize("layout", ["2+2"])
def test_messages(layout, tmp_path):
    result, ranks = said("no message", layout, tmp_path)
    assert ranks[0]["error"] == "CollectiveTimeoutError" and "rank 3 on hostb" in ranks[0]["text"], str(result)
    (other := tmp_path / "size").mkdir()
    result, ranks = said("size of a message", layout, other)
    assert ranks[0]["error"] == "CollectiveMismatchError" and "400000 bytes" in ranks[0]["text"], str(result)


@pytest.mark.parametrize("layout", BOTH)
def test_a_rank_that_leaves_is_named(layout, tmp_path):
    result, ranks = said("left", layout, tmp_path)
    for rank in range(3):
        assert ranks[rank]["error"] == "PeerLostError", str(result)
        assert "rank 3 on hostb has left the group" in ranks[rank]["text"] and ranks[rank]["seconds"] < 3.0, str(result)


@pytest.mark.parametrize("layout", BOTH)
def test_abort_reaches_all_hosts(layout, tmp_path):
    result, ranks = said("aborted", layout, tmp_path)
    for rank in range(3):
        assert ranks[rank]["error"] == "AbortedError" and ranks[rank]["seconds"] < 2.5, str(result)


@pytest.mark.parametrize("layout", BOTH)
def test_a_signal_handler_that_raises_amid_a_small_all_reduce_ends_it_for_all(layout, tmp_path):
    result, ranks = said("interrupted", layout, tmp_path)
    assert ranks[3]["error"] == "InterruptedError" and ranks[3]["seconds"] < 0.9, str(result)
    for rank in range(3):
        assert ranks[rank]["error"] == "AbortedError" and "rank 3 on hostb" in ranks[rank]["text"], str(result)
        assert ranks[rank]["seconds"] < (2.5 if rank == 0 else 1.5), str(result)


def test_a_cut_network_ends_in_the_time_out_and_names_who_is_missing(tmp_path):
    layout = Layout.parse("2+2")
    if reason := layout.why_not():
        pytest.skip(reason)
    hosts = rig_of(layout)
    stop = threading.Event()

    def cut():
        while len(list(tmp_path.glob("*.ready"))) < 4:
            if stop.wait(0.1):
                return
        if not stop.wait(1.0):
            hosts.cut("hostb")

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        began = time.monotonic()
        start([FAULT, "cut", tmp_path], layout=layout, address=False, flags=SURVIVE["mpich"], deadline=30)
    except AssertionError:
        pass  # the launcher cannot reach its other half; the ranks have spoken
    finally:
        stop.set()
        thread.join()
        hosts.heal("hostb")
    assert time.monotonic() - began < 45
    ranks = read(tmp_path)
    assert sorted(ranks) == [0, 1, 2, 3]
    for rank, value in ranks.items():
        assert value["error"] == "CollectiveTimeoutError", value
        assert f"on host{'b' if rank < 2 else 'a'}" in value["text"].split("Missing")[1], value
