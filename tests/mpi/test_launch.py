"""Real jobs on one host, started by mpiexec. Each has a deadline and leaves no process behind."""

import time
from pathlib import Path

import pytest

from programs.launch import free_port

from .installation import NAMES, SCRIPTS, installation

pytestmark = pytest.mark.lane3


@pytest.fixture(scope="module", params=NAMES)
def mpi(request):
    """For what the launcher has a part in."""
    return installation(request.param)


@pytest.fixture(
    scope="module",
    params=[
        "default",
        pytest.param(
            "openmpi",
            marks=pytest.mark.full(
                "what is tested is ours, whoever has started us; what a launcher does is tested with both"
            ),
        ),
    ],
)
def one_mpi(request):
    return installation(request.param)


def check_met(said, size, times=1):
    assert sorted(said) == list(range(size))
    for rank, value in said.items():
        assert value["size"] == size
        assert value["totals"] == [size * (size + 1) / 2] * times


EARLY = {"C10D_CUSTOM_LAUNCHER": "import"}  # for scripts that read LOCAL_RANK before init_process_group


def test_an_unchanged_script_with_nothing_in_its_environment(mpi):
    said = mpi.finish(3, SCRIPTS / "meet.py", "--times", "2")
    check_met(said, 3, times=2)
    for rank, value in said.items():
        assert value["mpi"] == [rank, 3]
        assert set(value["before"].values()) == {None}
        after = value["after"]
        assert (after["RANK"], after["WORLD_SIZE"], after["LOCAL_WORLD_SIZE"]) == (str(rank), "3", "3")
        assert value["addr"]
        assert value["ports"] == said[0]["ports"]  # of two stores: destroy_process_group ended the first
    assert sorted(v["after"]["LOCAL_RANK"] for v in said.values()) == ["0", "1", "2"]


def test_a_script_that_reads_them_before(one_mpi):
    """And asks for another backend, whose groups then find each other so, too."""
    said = one_mpi.finish(2, SCRIPTS / "meet.py", "--backend", "gloo", env=EARLY)
    check_met(said, 2)
    for rank, value in said.items():
        before = value["before"]
        assert (before["RANK"], before["WORLD_SIZE"], before["LOCAL_WORLD_SIZE"]) == (str(rank), "2", "2")
        assert before["MASTER_ADDR"] is None and value["addr"]
    assert sorted(v["before"]["LOCAL_RANK"] for v in said.values()) == ["0", "1"]


def test_in_gloos_place(one_mpi):
    check_met(one_mpi.finish(2, SCRIPTS / "meet.py", "--backend", "gloo", env={"C10D_CUSTOM_REPLACES": "gloo"}), 2)


def test_another_backend_gets_torch_s_own_error(one_mpi):
    result = one_mpi.start(1, SCRIPTS / "meet.py", "--backend", "gloo")
    assert result.code and "environment variable RANK expected, but not set" in result.errors, str(result)


def test_one_rank(one_mpi):
    check_met(one_mpi.finish(1, SCRIPTS / "meet.py"), 1)


def test_ddp(one_mpi):
    said = one_mpi.finish(2, SCRIPTS / "ddp.py", env=EARLY)
    assert sorted(said) == [0, 1] and said[0]["digest"] == said[1]["digest"]
    assert sorted(v["local_rank"] for v in said.values()) == [0, 1]


def test_the_explicit_form_needs_no_environment(one_mpi):
    said = one_mpi.finish(2, SCRIPTS / "meet.py", "--init", "mpi://", env={"C10D_CUSTOM_LAUNCHER": "0"})
    check_met(said, 2)
    assert all(v["before"]["RANK"] is None for v in said.values())


@pytest.mark.parametrize(
    "backend", ["custom", pytest.param("gloo", marks=pytest.mark.full("torch reads the same values for both"))]
)
def test_explicit_values_win(one_mpi, backend):
    """Ranks in the reverse of MPI's order, and no MPI is started."""
    program = (
        "import os, runpy, sys\n"
        "rank = int(os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')))\n"
        "os.environ.update(RANK=str(1 - rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')\n"
        f"sys.argv = ['meet.py', '--backend', '{backend}']\n"
        f"runpy.run_path(r'{SCRIPTS / 'meet.py'}', run_name='__main__')"
    )
    said = one_mpi.finish(2, "-c", program, env={"MASTER_PORT": str(free_port())})
    check_met(said, 2)
    for rank, value in said.items():
        assert value["before"]["RANK"] == str(rank) and value["before"]["LOCAL_RANK"] is None
        assert value["mpi"] == [None, None] and value["addr"] == "127.0.0.1"


def test_an_address_of_the_user_s_goes_without_mpi(one_mpi):
    """RANK from us, MASTER_ADDR from the user: torch's own env://."""
    said = one_mpi.finish(
        2, SCRIPTS / "meet.py", env={**EARLY, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    )
    check_met(said, 2)
    assert all(value["mpi"] == [None, None] for value in said.values())


def test_switched_off_it_is_torch_s_own_error(one_mpi):
    result = one_mpi.start(1, SCRIPTS / "meet.py", env={"C10D_CUSTOM_LAUNCHER": "0"})
    assert result.code and "environment variable RANK expected, but not set" in result.errors, str(result)


def test_a_contradicting_argument_is_an_error(one_mpi):
    result = one_mpi.start(2, SCRIPTS / "meet.py", "--size", "4")
    assert result.code and "the argument world_size says 4, but MPI says 2" in result.errors, str(result)
    assert not result.left_over, str(result)


def mpich_files():
    return {path.name for path in Path("/dev/shm").glob("mpich_shm_*")}


def check_end(mpi, how, where, code, words):
    before = mpich_files()
    result = mpi.start(2, SCRIPTS / "fail.py", how, where, deadline=90)
    until = time.monotonic() + 20
    while (left := mpich_files() - before) and time.monotonic() < until:
        time.sleep(0.1)  # those of jobs of other tests, while they start
    assert not left, f"{left}\n{result}"
    assert result.code == code if code else result.code, str(result)
    assert words in result.errors and not result.left_over, str(result)


@pytest.mark.parametrize(
    "how,where,code,words",
    [
        ("raise", "collective", 1, "ZeroDivisionError: the reason"),
        ("interrupt", "busy", 130, "KeyboardInterrupt"),
        ("exit_raised", "finalize", 3, ""),
    ],
)
def test_a_rank_that_fails_ends_the_job(mpi, how, where, code, words):
    check_end(mpi, how, where, code, words)


@pytest.mark.parametrize(
    "how,where,code,words",
    [
        ("exit", "busy", 3, ""),
        ("own_hook_before", "busy", 1, "the program's own hook"),
        *(
            pytest.param(*how, marks=pytest.mark.full("two of these ends, and the three above, are in the default run"))
            for how in (
                ("raise", "busy", 1, "ZeroDivisionError: the reason"),
                ("raise", "finalize", 1, "ZeroDivisionError: the reason"),
                ("exit", "collective", None, ""),  # the other rank's PeerLostError may be the first to end the job
                ("own_hook", "busy", 1, "the program's own hook"),
                ("exit_builtin", "busy", 3, ""),
                ("exit_text", "busy", 1, "the reason"),
            )
        ),
    ],
)
def test_it_ends_wherever_and_however_a_rank_fails(one_mpi, how, where, code, words):
    check_end(one_mpi, how, where, code, words)


def test_a_rank_that_fails_before_it_starts_mpi(mpi):
    """MPI's own start would wait for it for ever."""
    program = (
        "import os, torch.distributed as dist\nfrom datetime import timedelta\n"
        "if os.environ['RANK'] == '1':\n    raise ZeroDivisionError('the reason')\n"
        "dist.init_process_group('gloo', timeout=timedelta(seconds=2))"
    )
    # Open MPI's launcher was seen to hang once its ranks had ended ("PMIX_ERR_UNREACH"), about once in a hundred runs.
    result = mpi.start(2, "-c", program, deadline=60, env=EARLY)
    assert result.code == 1 and "ZeroDivisionError: the reason" in result.errors, str(result)


def test_a_caught_exit_ends_nothing(one_mpi):
    one_mpi.finish(2, SCRIPTS / "fail.py", "caught", "finalize")


def test_a_subprocess_is_not_taken_for_a_rank(one_mpi):
    said = one_mpi.finish(2, SCRIPTS / "child.py", env=EARLY)
    assert sorted(said) == [0, 1]
    for value in said.values():
        found, rank, has_pmi = value["child"]
        if has_pmi:  # Open MPI's variables cannot be told from inherited ones
            assert (found, rank) == ("None", None)


@pytest.mark.parametrize(
    "backend", ["custom", pytest.param("gloo", marks=pytest.mark.full("no rank of these asks the launcher"))]
)
def test_mp_spawn_under_a_launcher(one_mpi, backend):
    said = one_mpi.finish(1, SCRIPTS / "spawn.py", backend)
    assert {r: (v["total"], v["mpi"]) for r, v in said.items()} == {0: (3.0, False), 1: (3.0, False)}


def test_torchrun_under_a_launcher(one_mpi):
    said = one_mpi.finish(1, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPTS / "meet.py")
    check_met(said, 2)
    assert all(value["mpi"] == [None, None] for value in said.values())
