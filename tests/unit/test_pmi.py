"""The launcher's side of PMI-1, as libmpi would speak to it."""

import os
import socket
import threading

import pytest

from c10d_custom.launch import launcher
from c10d_custom.launch.pmi import PmiServer, process_mapping


def expanded(mapping, ranks):
    """The node of each rank, as libmpi reads it: MPIR's nodemap goes through the blocks, again and again."""
    assert mapping.startswith("(vector,(") and mapping.endswith("))")
    blocks = [tuple(map(int, block.split(","))) for block in mapping[len("(vector,(") : -2].split("),(")]
    nodes = []
    while len(nodes) < ranks:
        nodes += [node for first, count, each in blocks for node in range(first, first + count) for _ in range(each)]
    return nodes[:ranks]


@pytest.mark.parametrize(
    "nodes, blocks",
    [
        ([0, 0, 1, 1], 1),
        ([0, 0, 0, 1], 2),
        ([0, 1, 0, 1], 2),
        ([0, 1, 2, 2, 1, 0], 4),
        ([0, 0, 1, 1, 2, 2, 0, 0, 1], 3),
        (list(range(4096)), 1),
    ],
)
def test_a_mapping_says_where_each_rank_is(nodes, blocks):
    mapping = process_mapping(nodes)
    assert expanded(mapping, len(nodes)) == nodes and mapping.count("(") == 1 + blocks


def test_a_mapping_fits_a_value():
    nodes = [i % 1000 // 2 * 2 + i % 2 if i % 3 else i % 7 for i in range(4000)]
    mapping = process_mapping(nodes)
    assert len(mapping) < 4096 and expanded(mapping, 4000) == list(range(4000))


class Libmpi:
    def __init__(self, number):
        self.socket = socket.socket(fileno=os.dup(number))
        self.answers = self.socket.makefile()

    def ask(self, line):
        self.socket.sendall(f"{line}\n".encode())
        return self.answers.readline().rstrip("\n")


class KeyValues:
    """Of two ranks: this one, and one that has put "theirs" before the first barrier."""

    def __init__(self):
        self.met, self.fetched, self._all = [], [], {}

    def meet(self, barrier, put):
        self.met.append((barrier, dict(put)))
        self._all |= put | ({} if barrier else {"theirs": "of=rank"})

    def all(self, barrier):
        self.fetched.append(barrier)
        return dict(self._all)


def test_what_libmpi_asks(monkeypatch):
    monkeypatch.setenv("PMIX_NAMESPACE", "outer")
    key_values = KeyValues()
    server = PmiServer(0, 2, "job", [0, 1], key_values)
    with server.environment():
        assert (os.environ["PMI_RANK"], os.environ["PMI_SIZE"]) == ("0", "2") and "PMIX_NAMESPACE" not in os.environ
        libmpi = Libmpi(int(os.environ["PMI_FD"]))
    assert not [name for name in os.environ if name.startswith("PMI_")] and os.environ["PMIX_NAMESPACE"] == "outer"

    over = threading.Event()
    serving = threading.Thread(target=server.serve, args=(over.is_set,))
    serving.start()
    try:
        assert libmpi.ask("cmd=init pmi_version=1 pmi_subversion=1").startswith("cmd=response_to_init pmi_version=1 ")
        assert libmpi.ask("cmd=get_my_kvsname") == "cmd=my_kvsname kvsname=job"
        assert "rc=-1" in libmpi.ask("cmd=get kvsname=job key=theirs")  # unknown yet, and not waited for
        assert "rc=0" in libmpi.ask("cmd=put kvsname=job key=mine value=a=b")
        assert libmpi.ask("cmd=barrier_in") == "cmd=barrier_out rc=0" and key_values.met == [(0, {"mine": "a=b"})]
        assert libmpi.ask("cmd=get kvsname=job key=PMI_process_mapping").endswith("value=(vector,(0,2,1))")
        assert key_values.fetched == []  # of those that ask for nothing more, nobody fetches it
        assert libmpi.ask("cmd=get kvsname=job key=mine").endswith("value=a=b")
        assert libmpi.ask("cmd=get kvsname=job key=theirs").endswith("value=of=rank")
        assert "rc=-1" in libmpi.ask("cmd=get kvsname=job key=nobodys") and key_values.fetched == [0]
        assert libmpi.ask("cmd=barrier_in") == "cmd=barrier_out rc=0" and key_values.met[1:] == [(1, {})]
        assert libmpi.ask("cmd=get kvsname=job key=theirs").endswith("value=of=rank") and key_values.fetched == [0]
        assert "rc=-1" in libmpi.ask("cmd=get kvsname=job key=nobodys") and key_values.fetched == [0, 1]
    finally:
        over.set()
        serving.join()

    server.go_on()
    assert "rc=-1" in libmpi.ask("cmd=spawn nprocs=2")
    assert libmpi.ask("cmd=barrier_in") == "cmd=barrier_out rc=0" and len(key_values.met) == 2  # alone
    server.end(finalized=False)
    # Nobody answers now; an exit handler finds what it waits for.
    assert [libmpi.answers.readline() for _ in range(2)] == ["cmd=barrier_out rc=0\n", "cmd=finalize_ack rc=0\n"]


def test_what_they_raise_ends_the_serving(monkeypatch):
    def meet(_barrier, _put):
        raise TimeoutError("rank 1")

    key_values = KeyValues()
    monkeypatch.setattr(key_values, "meet", meet)
    server = PmiServer(0, 2, "job", [0, 1], key_values)
    with server.environment():
        libmpi = Libmpi(int(os.environ["PMI_FD"]))
    libmpi.socket.sendall(b"cmd=barrier_in\n")
    with pytest.raises(TimeoutError, match="rank 1"):
        server.serve(lambda: False)


@pytest.mark.parametrize(
    "env, starts",
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, False),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "PMIX_NAMESPACE": "x"}, True),
    ],
    ids=["none", "mpirun", "torchrun by mpirun", "plain srun", "srun --mpi=pmix"],
)
def test_who_starts_mpi(monkeypatch, env, starts):
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert launcher.starts_mpi() is starts
