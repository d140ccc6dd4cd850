"""torchrun over two or three hosts: a rank, an agent, a host or its network is lost, and the job goes on; or a rank is
lost before it begins. Each says how long that took."""

import time

import pytest

from harness import Layout
from harness.job import rig_of

from .elastic_job import ElasticJob

SOON = 2.0  # s: for the loss to be told on the other host
TIMEOUT = 6.0  # s: of groups, where only that can tell
# An agent counts as dead after 8 s: two that are only slow, and are taken for dead after 2, have each begun alone, for
# good. One that is left waits 3 s for others to come.
FLAGS = [
    *("--max-restarts", 5, "--monitor-interval", 0.1),
    *("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=3"),
]


# With a store of the agents' own for the workers, an agent that comes later waits in vain to be told where it is (torch
# 2.15).
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def resizable(hosts, folder, **options):
    flags = ["--nnodes", f"1:{len(hosts.names)}", *FLAGS]
    return ElasticJob(hosts, folder / "job", flags, variables=VARIABLES, **options)


def rig(layout):
    layout = Layout.parse(layout)
    if reason := layout.why_not():
        pytest.skip(reason)
    return rig_of(layout)


@pytest.fixture
def hosts():
    return rig("torchrun:2+2")


@pytest.fixture
def three_hosts():
    return rig("torchrun:1+1+1")


def on(host, workers):
    return [worker for worker in workers if worker.host == host]


def names(workers):
    """Of their hosts."""
    return sorted({worker.host for worker in workers})


@pytest.fixture
def times(record_property):
    """Given to it as seconds and what had happened by then; shown at the end of the run."""
    return lambda seconds, what: record_property("figures", f"{what} after {seconds:.1f} s")


def require_named(job, survivors, lost, moment, times, limit=SOON):
    """Each of the survivors raised PeerLostError, naming one of the lost and its host, in time."""
    errors = job.errors(survivors)
    for worker in survivors:
        said = errors[worker]
        assert said["kind"] == "PeerLostError", said
        assert any(f"rank {other.rank} on {other.host}" in said["text"] for other in lost), said
        assert said["time"] - moment < limit, said
    times(max(errors[worker]["time"] for worker in survivors) - moment, "the loss was named")


def require_good_end(job, *agents):
    job.stop()
    assert [job.agent_ended(host) for host in agents] == [0] * len(agents), str(job)
    assert job.left_over() == ([], set()), str(job)


def go_on_without(job, lost, times):
    """The job loses these hosts, one after the other, goes on each time with those left, and gets the last one back."""
    for host in job.hosts.names:
        job.start_agent(host)
    alive = job.up(job.per_host * len(job.hosts.names))
    gone, first = [], 1
    for host in lost:
        moment = job.kill_agent(host, workers=True)
        dead = on(host, alive)
        left = [worker for worker in alive if worker not in dead]
        require_named(job, left, dead, moment, times)
        gone += alive
        alive = job.up(len(left), but=gone)
        assert names(alive) == names(left)
        times(time.monotonic() - moment, f"the job went on on {' and '.join(names(alive))}")
        first = require_gone_on(job, alive, first)
    moment = time.monotonic()
    job.start_agent(lost[-1])
    gone += alive
    alive = job.up(len(alive) + job.per_host, but=gone)
    times(time.monotonic() - moment, "a host was back in")
    assert names(alive) == sorted({*names(left), lost[-1]})
    require_gone_on(job, alive, first)
    require_good_end(job, *names(alive))


def require_gone_on(job, workers, at_least):
    """All of them from one step, which a checkpoint of the ones before them had reached; the step."""
    (first,) = {job.said(worker, "up")["first"] for worker in workers}
    assert first >= at_least
    return first


def test_without_two_of_three_hosts_the_job_goes_on_and_takes_one_back_in(three_hosts, tmp_path, times):
    with resizable(three_hosts, tmp_path, per_host=1) as job:
        go_on_without(job, ["hostb", "hostc"], times)


@pytest.mark.parametrize("netmod", ["ucx", pytest.param("ofi", marks=pytest.mark.full("the same over libfabric"))])
def test_without_the_host_of_rank_0(hosts, tmp_path, times, monkeypatch, netmod):
    """The rendezvous is on none of the two."""
    monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", netmod)
    with resizable(hosts, tmp_path) as job:
        job.serve_rendezvous()
        go_on_without(job, ["hosta"], times)


def test_workers_without_an_agent_end_by_themselves_once_another_takes_its_place(hosts, tmp_path, times):
    with resizable(hosts, tmp_path) as job:
        for host in hosts.names:
            job.start_agent(host)
        four = job.up(4)
        moment = job.kill_agent("hostb")
        job.start_agent("hostb")
        job.errors(four)  # their end
        times(time.monotonic() - moment, "all workers had ended")
        job.up(4, but=four)
        times(time.monotonic() - moment, "the job went on")
        require_good_end(job, "hosta", "hostb")


def test_a_cut_network_ends_in_the_time_out_and_the_job_goes_on(hosts, tmp_path, times):
    with resizable(hosts, tmp_path, timeout=TIMEOUT) as job:
        for host in hosts.names:
            job.start_agent(host)
        four = job.up(4)
        moment = time.monotonic()
        hosts.cut("hostb")
        try:
            errors = job.errors(four)
            times(max(said["time"] for said in errors.values()) - moment, f"calls of {TIMEOUT:.0f} s had failed")
            for worker, said in errors.items():
                assert said["kind"] == "CollectiveTimeoutError", said
                missing = "rank 2 on hostb", "rank 3 on hostb", "rank 0 on hosta", "rank 1 on hosta"
                there = missing[:2] if worker.host == "hosta" else missing[2:]
                assert any(rank in said["text"] for rank in there), said
            two = job.up(2, but=four)
            times(time.monotonic() - moment, "one host went on")
        finally:
            hosts.heal("hostb")
        moment = time.monotonic()
        job.up(4, but=[*four, *two])
        times(time.monotonic() - moment, "healed, both did")
        require_good_end(job, "hosta", "hostb")


@pytest.mark.full("a case of its own, but slow: kills.py kills ranks that start, many times, by hand")
def test_a_rank_that_fails_before_its_first_group_delays_no_restart(hosts, tmp_path, times):
    """The store is kept, and the other ranks have been there and it has not."""
    with ElasticJob(hosts, tmp_path / "job", ["--nnodes", 2, "--max-restarts", 1, "--monitor-interval", 0.1]) as job:
        (job.folder / "fail").write_text("3")
        moment = time.monotonic()
        for host in hosts.names:
            job.start_agent(host)
        job.up(4)
        times(time.monotonic() - moment, "the job, started twice, was up")
        assert not (job.folder / "fail").exists()
        assert not job.all_said("error"), str(job)  # no attempt began and timed out
        require_good_end(job, *hosts.names)
