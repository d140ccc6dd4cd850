"""Ways to start processes, ways for them to find each other, and torchrun's restarts."""

import pytest

from .launch import backend, free_port, script, start, torchrun

# Every rendezvous with fork, which is cheap; every start method with at least one rendezvous.
LAUNCHES = [
    ("fork", "env", 2),
    ("fork", "tcp", 2),
    ("fork", "file", 2),
    ("fork", "tcpstore", 4),
    ("fork", "filestore", 2),
    ("fork", "env", 1),
    ("spawn", "env", 2),
    ("forkserver", "tcp", 2),
]


@pytest.mark.parametrize("start_method,init,size", LAUNCHES)
def test_launch(start_method, init, size, tmp_path):
    result = script("launch_process", start_method, init, size, tmp_path)
    said = result.json_by_rank()
    assert sorted(said) == list(range(size)), str(result)
    for rank, value in said.items():
        assert value == {
            "rank": rank,
            "size": size,
            "total": [size * i + sum(range(size)) for i in range(5)],
            "ranks": list(range(size)),
            "processes": size,
            "left": [float((rank - 1) % size)] * 3,
        }, str(result)


def check_torchrun(result, size, attempt=0):
    said = result.json_by_rank()
    assert sorted(said) == list(range(size)), str(result)
    for rank, value in said.items():
        assert value == {
            "rank": rank,
            "size": size,
            "local_rank": rank,
            "attempt": attempt,
            "total": size * (size + 1) // 2,
        }, str(result)


def test_torchrun_standalone():
    check_torchrun(torchrun(["--standalone", "--nproc-per-node=2"], "launch_torchrun"), 2)


@pytest.mark.full("the jobs of --job torchrun:2+2 meet so, too")
def test_torchrun_static_rendezvous():
    arguments = ["--nnodes=1", "--nproc-per-node=3", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    check_torchrun(torchrun(arguments, "launch_torchrun"), 3)


@pytest.mark.parametrize(
    "when, shared_store",
    [
        pytest.param("before", True, id="before-shared_store"),
        *(
            pytest.param(*case, marks=pytest.mark.full("tests/mpi's elastic jobs restart after it was used"), id=name)
            for name, case in {
                "after-own_store": ("after", False),
                "before-own_store": ("before", False),
                "after-shared_store": ("after", True),
            }.items()
        ),
    ],
)
def test_torchrun_restarts_after_a_rank_failed_once(when, shared_store, tmp_path):
    """Rank 1 fails before it joins the group, or after the group was used.

    By default torchrun's agent serves one store for all attempts, without a prefix for each, so that a
    backend meets the keys of the attempt that failed; TORCHELASTIC_RESTART_COUNT in the environment
    tells the attempts apart. With the variable below rank 0 serves a new store each time.
    """
    if shared_store and backend() == "gloo":
        pytest.skip(
            "gloo takes addresses of the failed attempt for current ones (pytorch issue 135712): now and then "
            "it hangs or fails to connect"
        )
    result = torchrun(
        ["--standalone", "--nproc-per-node=2", "--max-restarts=1"],
        "launch_torchrun",
        tmp_path,
        when,
        deadline=90,
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if shared_store else "1"},
    )
    # The first attempt printed no line: rank 1 left, rank 0 was inside init_process_group or a collective.
    check_torchrun(result, 2, attempt=1)


def test_the_deadline_kills_and_tells():
    """A grandchild in a session of its own goes too, and what was printed is in the message."""
    program = (
        "import subprocess, sys, time; print('printed before', flush=True); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], start_new_session=True); "
        "time.sleep(100)"
    )
    with pytest.raises(AssertionError, match="(?s)no end after 2 s.*printed before.*most recent call first"):
        start(["-c", program], deadline=2)
