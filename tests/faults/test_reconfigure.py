"""A group that is made again, of processes that the program names (dist._reconfigure, torch 2.15), on one host. Over
several: mpi/test_reconfigure.py."""

import json
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import UsageError
from c10d_custom.recovery.handle import Handle
from harness.shm import in_dev_shm

from .regrouping import Workers
from .schedules import SEEDS, Pool, Schedule

pytestmark = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this torch has no reconfigure")


def test_it_grows_shrinks_replaces_and_takes_others():
    with Workers() as workers:
        workers.start("abc")
        workers.require_group("ab")
        workers.require_group("abc")
        workers.require_group("ca")  # b stays, in no group
        workers.require_group("bac", ordered=False)
        workers.start("d")
        workers.require_group("adc")  # one is replaced
        workers.start("e")
        workers.require_group("ebd")  # all but one are new
        workers.end()


def test_the_dead_are_named_at_once_and_the_others_go_on():
    with Workers() as workers:
        workers.start("abc")
        workers.require_group("abc")
        workers.kill("b")
        lost = workers.ask("ac", "reduce")
        assert {said["error"] for said in lost.values()} == {"PeerLostError"}, lost
        for said in workers.regroup("abc", callers="ac").values():
            assert said["error"] == "PeerLostError" and workers.named("b") in said["text"], said
        workers.require_group("ca")
        workers.end()


def test_what_rests_on_the_group_after_a_loss():
    """The table of docs/recovery.md."""
    with Workers() as workers:
        workers.start("abc")
        workers.require_group("abc")
        workers.ask("abc", "make")
        right = {"new_group": {"sum": 3.0}, "mesh": {"sum": 3.0}, "dtensor": {"whole": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}}
        right |= {"fsdp": {"gradient": [2.0]}, "ddp": {"gradient": [2.0]}}
        assert workers.ask("abc", "try") == dict.fromkeys("abc", right)
        workers.kill("c")
        workers.require_group("ab")
        for said in workers.ask("ab", "try").values():
            assert said["new_group"] == {"error": "PeerLostError"}, said
            assert said["mesh"] == {"sum": 2.0} and said["ddp"] == {"gradient": [1.5]}, said
            assert "error" in said["dtensor"] and "error" in said["fsdp"], said


def test_a_member_that_does_not_come_is_named_by_handle_and_host():
    with Workers() as workers:
        workers.start("abc")
        hostname = workers.handles["a"].split(":")[1]
        for absent in "ac":
            said = workers.regroup("abc", seconds=3, callers=[name for name in "abc" if name != absent])
            for name, value in said.items():
                assert value["error"] == "TransportError" and value["seconds"] < 10, said
                _, named = value["text"].split("Not known to have come: ")
                assert workers.named(absent) in named and f"on {hostname}" in named, (name, value)
                assert not any(workers.named(other) in named for other in "abc" if other != absent), value
        workers.require_group("abc")
        workers.end()


def test_a_member_that_is_stopped_for_seconds_is_waited_for():
    """The first, whose store the others meet at, or another."""
    with Workers() as workers:
        workers.start("abc")
        for stopped in "ab":
            uuid, handles = workers.uuid(), workers.given("abc")
            workers.process(stopped).send_signal(signal.SIGSTOP)
            for name in "abc":
                workers.tell(name, "regroup", uuid=uuid, handles=handles, ordered=True, seconds=60)
            time.sleep(7)  # more than a look at a store may take
            workers.process(stopped).send_signal(signal.SIGCONT)
            said = {name: workers.hear(name) for name in "abc"}
            assert [said[name].get("rank") for name in "abc"] == [0, 1, 2], said
        workers.end()


def test_two_that_were_given_different_sets_are_both_told():
    with Workers() as workers:
        workers.start("abc")
        for first, second in (("ab", "abc"), ("ab", "ba"), ("ab", "bc")):
            uuid = workers.uuid()
            for name, names in (("a", first), ("b", second)):
                given = workers.given(names)
                workers.tell(name, "regroup", uuid=uuid, handles=given, ordered=True, seconds=20)
            for name in "ab":
                said = workers.hear(name)
                assert said["error"] == "CollectiveMismatchError" and said["seconds"] < 15, (first, second, said)
                for other in "ab":
                    assert workers.named(other) in said["text"], (first, second, said)
        workers.require_group("ab")
        workers.end()


def test_what_no_group_can_come_of_is_refused_and_costs_nothing():
    with Workers() as workers:
        workers.start("ab")
        (said,) = workers.ask("a", "reduce").values()
        assert said["error"] == "UsageError" and "has not been configured" in said["text"], said
        uuid = workers.uuid()
        assert all("error" not in said for said in workers.regroup("ab", uuid=uuid).values())
        a, b = workers.given("ab")
        wrong = {
            "was used before": (uuid, [a, b]),
            "not among those given": (uuid + 1000, [b]),
            "twice": (uuid + 1001, [a, b, b]),
            "is no handle": (uuid + 1002, [a, "gloo:0"]),
        }
        for text, (number, handles) in wrong.items():
            (said,) = workers.ask("a", "regroup", uuid=number, handles=handles, ordered=True, seconds=5).values()
            assert said["error"] == "UsageError" and text in said["text"], said
        assert workers.ask("ab", "reduce")["a"].keys() == {"seconds"}  # the group is as it was
        workers.end()


@pytest.fixture
def alone():
    dist.init_process_group("custom", enable_reconfigure=True, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_nobody_is_served_once_the_group_is_destroyed(alone):
    """Even while the program keeps the object, and a subgroup's."""
    handle = dist._get_reconfigure_handle()
    dist._reconfigure(1, [handle]).wait()
    kept = dist.new_group([0])
    address = "127.0.0.1", Handle(handle).port
    socket.create_connection(address, 5).close()
    dist.destroy_process_group()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 5)
    with pytest.raises(UsageError, match="has been destroyed"):
        dist._reconfigure(2, [handle], alone)
    assert kept.size() == 1


def test_what_it_says_of_itself(alone):
    """Before and after it has ranks. (Of a group that was made otherwise: torch_api/.)"""
    for _ in range(2):
        backend = alone._get_backend(torch.device("cpu"))
        assert dist._supports_reconfigure() and backend.supports_reconfigure
        assert dist._supports_window() and backend.supports_window
        assert not backend.supports_shrinking
        with pytest.raises(RuntimeError, match="does not support shrink"):
            backend.shrink([0])
        assert backend.get_reconfigure_handle() == dist._get_reconfigure_handle()
        dist._reconfigure(random.randrange(1 << 40), [dist._get_reconfigure_handle()]).wait()
    window = dist._new_window(torch.zeros(1))
    window.tensor_deregister()


@pytest.fixture(scope="module")
def pool():
    with Pool() as pool:
        yield pool


@pytest.mark.parametrize("seed", SEEDS)
def test_random_schedules(pool, seed):
    Schedule(pool, seed).run(8)
    assert not [name for name in in_dev_shm() if "c10d" in name]


@pytest.mark.parametrize(
    "started_by, codes",
    [
        pytest.param([], {"first": 0, "victim": -9, "second": 0, "new": 0}, id="itself"),
        pytest.param(
            ["--torchrun"],
            {"first": 0, "victim": 0, "second": 0},
            id="a torchrun for each",
            marks=pytest.mark.full("the same, once the processes run"),
        ),
    ],
)
def test_a_training_loses_a_rank_goes_on_and_takes_another_in(started_by, codes, tmp_path):
    """And comes to the bits of a run with the same ranks that was never disturbed."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("train_and_regroup.py"), tmp_path, *started_by],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert said["codes"] == codes, said
    assert sorted(said["results"]) == ["first", "new", "second"], said
    assert [size for _, size in said["results"]["first"]["history"]] == [3, 2, 3], said
    assert said["results"]["new"]["history"] == [[40, 3]], said
    assert {result["bits"] for result in said["results"].values()} == {said["undisturbed"]}, said
