"""Groups over processes that share no default group, as programs make them over a trainer and an inference engine: by
torch's _new_process_group_helper, with a store of their own. Each job may have a default group, and be torchrun's, or
not; and may be started again."""

import contextlib
import itertools
import os
import signal
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from c10d_custom.c10d import meeting
from c10d_custom.c10d.issuing import NewGroup
from c10d_custom.c10d.process_group import build
from c10d_custom.errors import CustomBackendError, PeerLostError, TransportError, UsageError
from harness import Layout

from .spawn import backend, run

pytestmark = pytest.mark.skipif(Layout.chosen() is not None, reason="--job is one job; tests/mpi has two")

SECONDS = 30


def join(store, rank, size, name="weights", seconds=SECONDS):
    """As OpenRLHF, verl, SGLang and AReaL do."""
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend()),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=seconds),
    )
    c10d._world.pg_group_ranks[group] = {r: r for r in range(size)}
    return group


def total(group, value):
    t = torch.full((3,), float(value))
    (group or dist.group.WORLD).allreduce([t]).wait()
    return t[0].item()


@contextlib.contextmanager
def started(by_torchrun, restarts):
    """As in a rank that torchrun has started so often before, or in one that it has not."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    if by_torchrun:
        environment |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": f"{restarts}"}
    with patch.dict(os.environ, environment, clear=True), patch.dict(meeting._known, clear=True):
        yield


# (has the trainer a default group, the engine; did torchrun start the trainer, or else the engine)
WAYS = list(itertools.product([True, False], repeat=3))


def in_every_way(rank, size, folder):
    """Ranks 0 and 1 train, 2 and 3 are the engine; the group is of 0, 2 and 3."""
    trains, found = rank < 2, []
    for number, (world, engines_world, torchrun) in enumerate(WAYS):
        with started(torchrun is trains, restarts=1 if trains else 2):
            if world if trains else engines_world:
                mine = dist.FileStore(f"{folder}/{trains}-{number}", 2)
                dist.init_process_group(backend(), store=mine, rank=rank % 2, world_size=2)
            if rank != 1:
                shared = dist.FileStore(f"{folder}/{number}", 3)
                for _ in range(2 if backend() == "custom" else 1):  # gloo takes the addresses of the first for current
                    group = join(shared, max(0, rank - 1), 3)
                    weights = torch.full((3,), rank + 7.0)
                    dist.broadcast(weights, 0, group=group)
                    found.append((weights[0].item(), total(group, rank + 1)))
                    half = group.split_group([1, 2]) if backend() == "custom" else None
                    if half is not None:
                        found.append(total(half, rank))
                        half.shutdown()
                    dist.destroy_process_group(group)
            if dist.is_initialized():
                found.append(total(None, rank))
                dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", ["custom", pytest.param("gloo", marks=pytest.mark.full("the reference"))])
def test_trainer_and_engine_meet_in_every_way(name, tmp_path, monkeypatch):
    monkeypatch.setenv("C10D_TEST_BACKEND", name)
    once = [(7.0, 8.0)] if name == "gloo" else [(7.0, 8.0)] * 2
    engines = once if name == "gloo" else [(7.0, 8.0), 5.0] * 2
    expected = [[], [], [], []]
    for world, engines_world, _ in WAYS:
        for rank, said in enumerate((once, [], engines, engines)):
            expected[rank] += said
            if world if rank < 2 else engines_world:
                expected[rank].append(1.0 if rank < 2 else 5.0)
    assert run(in_every_way, 4, str(tmp_path), init=False) == expected


# --- one of them is started again


@contextlib.contextmanager
def child(act):
    """A process that does so, and is then there until it is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            time.sleep(SECONDS)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def the_engine_dies_and_comes_again(rank, size, folder, deaths):
    """Of a trainer of 4 ranks, rank 0 makes a group with the engine, a child of rank 3. Its rank there, 1, is in the
    trainer another's, which leaves meanwhile."""
    shared, notes = dist.FileStore(f"{folder}/shared", -1), dist.FileStore(f"{folder}/notes", -1)

    def engine(life):
        with started(True, life):
            said = total(join(dist.FileStore(f"{folder}/shared", -1), 1, 2), 2)
        dist.FileStore(f"{folder}/notes", -1).set(f"engine {life}", f"{said}")

    with contextlib.ExitStack() as engines:
        if rank == 3:
            pid = engines.enter_context(child(lambda: engine(0)))
            notes.set("pid 0", f"{pid}")
        dist.init_process_group(backend(), store=dist.FileStore(f"{folder}/trainer", 4), rank=rank, world_size=4)
        total(None, rank)
        if rank == 1:
            dist.destroy_process_group()
            notes.set("gone", "1")
        found = []
        for life in range(deaths + 1):
            if rank == 0:
                notes.wait(["gone"])
                group = join(shared, 0, 2)
                found.append(total(group, 1))
                if life < deaths:
                    notes.set(f"kill {life}", "1")
                    with contextlib.suppress(PeerLostError):
                        found.append("no error")
                        while True:
                            total(group, 1)
                    try:
                        total(group, 1)
                    except PeerLostError as error:
                        pid = notes.get(f"pid {life}").decode()
                        found[-1] = "rank 1" in str(error) and f"pid {pid}" in str(error) or str(error)
                dist.destroy_process_group(group)
            elif rank == 3:
                assert notes.get(f"engine {life}") == b"3.0"
                if life < deaths:
                    notes.get(f"kill {life}")
                    engines.close()
                    pid = engines.enter_context(child(lambda number=life + 1: engine(number)))
                    notes.set(f"pid {life + 1}", f"{pid}")
        return found


@pytest.mark.skipif(backend() == "gloo", reason="takes the addresses of the first life for current ones")
def test_the_engine_is_started_again(tmp_path):
    found = run(the_engine_dies_and_comes_again, 4, str(tmp_path), 2, init=False)
    assert found[0] == [3.0, True, 3.0, True, 3.0]


def rank_0_dies_amid_it(rank, size, folder):
    """The engine, a child of rank 1, is rank 0 of a group of 3, waits for the last and is killed; then it and the last
    come. Rank 0 of the trainer waits all the time."""

    def engine():
        with started(True, os.getpid()):
            found = total(join(dist.FileStore(f"{folder}/shared", -1), 0, 3), 1)
        dist.FileStore(f"{folder}/notes", -1).set("engine", f"{found}")

    shared, notes = dist.FileStore(f"{folder}/shared", -1), dist.FileStore(f"{folder}/notes", -1)
    if rank == 1:
        with child(engine):
            notes.get("waiting")
            time.sleep(0.5)  # until the two are likely to have heard of each other
        with child(engine):
            found = join_again(shared, 2)
            assert notes.get("engine") == b"6.0"
            return found
    notes.set("waiting", "1")
    return join_again(shared, 1)


def join_again(shared, rank):
    """As programs do that are to outlive an engine."""
    while True:
        with contextlib.suppress(CustomBackendError):
            return total(join(shared, rank, 3), rank + 1)


@pytest.mark.skipif(backend() == "gloo", reason="takes the addresses of the first life for current ones")
def test_rank_0_is_started_again_while_the_group_is_made(tmp_path):
    assert run(rank_0_dies_amid_it, 2, str(tmp_path), init=False) == [6.0, 6.0]


# --- what cannot be


def refused(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def given_what_does_not_fit(rank, size, folder):
    def store(name):
        return dist.FileStore(f"{folder}/{name}", -1)

    def init(name, number, of, by="custom"):
        dist.init_process_group(by, store=store(name), rank=number, world_size=of, timeout=timedelta(seconds=2))

    said = {"no such rank": refused(lambda: init("a", 2 + rank, 2))}
    said["another backend"] = refused(lambda: init("b", rank, 2, "gloo" if rank else "custom"))
    said["its rank 0"] = refused(lambda: init("c", rank, 2, "custom" if rank else "gloo"))
    said["another size"] = refused(lambda: join(store("d"), rank, 2 + rank, "other", seconds=2))
    return said


@pytest.mark.skipif(backend() == "gloo", reason="errors of ours")
def test_what_does_not_fit_is_named(tmp_path):
    first, second = run(given_what_does_not_fit, 2, str(tmp_path), init=False)
    for rank, said in enumerate((first, second)):
        kind, text = said["no such rank"]
        assert kind == UsageError.__name__ and f"rank {2 + rank}: there is no such rank in a group of 2" in text, text
    for kind, text in (first["another backend"], second["its rank 0"]):
        assert kind == TransportError.__name__ and "came with another backend, gloo" in text, text
    assert "Rank 1 came" in first["another backend"][1] and "Rank 0 came" in second["its rank 0"][1]
    kind, text = second["another size"]
    assert kind == TransportError.__name__ and "a group of 2 ranks here, where this rank was told 3" in text, text


def by_hand(rank, size, folder):
    """As torchft does, where each replica has a default group."""
    with started(True, rank):
        mine = dist.FileStore(f"{folder}/{rank}", 1)
        dist.init_process_group(backend(), store=mine, rank=0, world_size=1)
        shared = dist.FileStore(f"{folder}/shared", size)
        quorum = build(NewGroup(shared, rank, size, timedelta(seconds=SECONDS), "quorum", strangers=True))
        t = torch.full((3,), rank + 1.0)
        quorum.allreduce([t]).wait()
        quorum.shutdown()
        return t[0].item()


def test_replicas_with_default_groups_of_their_own(tmp_path):
    assert run(by_hand, 2, str(tmp_path), init=False) == [3.0, 3.0]
