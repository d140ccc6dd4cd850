"""torchrun over two hosts: an agent, a host or its network is lost, and the job goes on; or a rank before it begins."""

import pytest

from harness import Layout
from harness.job import rig_of

from .elastic_job import ElasticJob

SOON = 2.0  # s: for the loss to be told on the other host
TIMEOUT = 6.0  # s: of groups, where only that can tell
# An agent counts as dead after 8 s: two that are only slow, and are taken for dead after 2, have each begun alone, for
# good. One that is left waits 3 s for others to come.
FLAGS = [
    *("--nnodes", "1:2", "--max-restarts", 5, "--monitor-interval", 0.1),
    *("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=3"),
]


# With a store of the agents' own for the workers, an agent that comes later waits in vain to be told where it is (torch
# 2.15).
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def resizable(hosts, folder, **options):
    return ElasticJob(hosts, folder / "job", FLAGS, variables=VARIABLES, **options)


@pytest.fixture
def hosts():
    layout = Layout.parse("torchrun:2+2")
    if reason := layout.why_not():
        pytest.skip(reason)
    return rig_of(layout)


def on(host, workers):
    return [worker for worker in workers if worker.host == host]


def require_named(job, survivors, lost, moment, limit=SOON):
    """Each of the survivors raised PeerLostError, naming one of the lost and its host, in time."""
    errors = job.errors(survivors)
    for worker in survivors:
        said = errors[worker]
        assert said["kind"] == "PeerLostError", said
        assert any(f"rank {other.rank} on {other.host}" in said["text"] for other in lost), said
        assert said["time"] - moment < limit, said


def require_good_end(job, *agents):
    job.stop()
    assert [job.agent_ended(host) for host in agents] == [0] * len(agents), str(job)
    assert job.left_over() == ([], set()), str(job)


def go_on_without(job, lost):
    """The job loses a host, and gets it back."""
    for host in job.hosts.names:
        job.start_agent(host)
    four = job.up(4)
    moment = job.kill_agent(lost, workers=True)
    require_named(job, [worker for worker in four if worker.host != lost], on(lost, four), moment)
    two = job.up(2, but=four)
    assert job.said(two[0], "up")["first"] > 0
    job.start_agent(lost)
    again = job.up(4, but=[*four, *two])
    assert job.said(again[0], "up")["first"] >= job.said(two[0], "up")["first"]
    require_good_end(job, *job.hosts.names)


def test_without_a_host_the_job_goes_on_and_takes_it_back_in(hosts, tmp_path):
    with resizable(hosts, tmp_path) as job:
        go_on_without(job, "hostb")


@pytest.mark.full("as with the other host")
def test_without_the_host_of_rank_0(hosts, tmp_path):
    """The rendezvous is on none of the two."""
    with resizable(hosts, tmp_path) as job:
        job.serve_rendezvous()
        go_on_without(job, "hosta")


def test_workers_without_an_agent_end_by_themselves_once_another_takes_its_place(hosts, tmp_path):
    with resizable(hosts, tmp_path) as job:
        for host in hosts.names:
            job.start_agent(host)
        four = job.up(4)
        job.kill_agent("hostb")
        job.start_agent("hostb")
        job.errors(four)  # their end
        job.up(4, but=four)
        require_good_end(job, "hosta", "hostb")


@pytest.mark.full("the time-out names who is missing in mpi/test_faults.py; the restart is as after the loss of a host")
def test_a_cut_network_ends_in_the_time_out_and_the_job_goes_on(hosts, tmp_path):
    with resizable(hosts, tmp_path, timeout=TIMEOUT) as job:
        for host in hosts.names:
            job.start_agent(host)
        four = job.up(4)
        hosts.cut("hostb")
        try:
            for worker, said in job.errors(four).items():
                assert said["kind"] == "CollectiveTimeoutError", said
                missing = "rank 2 on hostb", "rank 3 on hostb", "rank 0 on hosta", "rank 1 on hosta"
                there = missing[:2] if worker.host == "hosta" else missing[2:]
                assert any(rank in said["text"] for rank in there), said
            two = job.up(2, but=four)
        finally:
            hosts.heal("hostb")
        job.up(4, but=[*four, *two])
        require_good_end(job, "hosta", "hostb")


def test_a_rank_that_fails_before_its_first_group_delays_no_restart(hosts, tmp_path):
    """The store is kept, and the other ranks have been there and it has not."""
    with ElasticJob(hosts, tmp_path / "job", ["--nnodes", 2, "--max-restarts", 1, "--monitor-interval", 0.1]) as job:
        (job.folder / "fail").write_text("3")
        for host in hosts.names:
            job.start_agent(host)
        job.up(4)
        assert not (job.folder / "fail").exists()
        assert not job.all_said("error"), str(job)  # no attempt began and timed out
        require_good_end(job, *hosts.names)
