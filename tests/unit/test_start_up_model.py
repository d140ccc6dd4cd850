"""The simulator's start-up: what must hold whatever its parameters, and that a fit finds them."""

import json
import subprocess
from dataclasses import replace

import pytest

from bench.model import Job
from bench.start_up import (
    ADDRESS,
    HEARD,
    INTERFACE,
    PLACE,
    RANK_IN_MPI,
    Machine,
    Point,
    bytes_handed_out,
    fit,
    start_up,
)
from unit.bench_cases import OWN_BENCH

JOBS = [Job.even(hosts, ranks) for hosts in (2, 4, 64, 512, 4096) for ranks in (1, 8)]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.hosts}x{job.ranks[0]}")
def test_the_server_takes_at_least_what_it_is_asked_and_hands_out(job):
    machine = Machine(connect=0.0)
    operations = 2 * 7 * job.size * machine.operation
    handed = bytes_handed_out(job) * machine.byte
    assert start_up(job, machine).server > operations + handed
    assert start_up(job, replace(machine, byte=0.0)).server > operations
    assert start_up(job, replace(machine, operation=0.0)).server == pytest.approx(handed)


def test_what_is_handed_out_is_a_square():
    job = Job.even(10, 3)
    assert bytes_handed_out(job) == 30 * (30 * PLACE + 30 * RANK_IN_MPI + 10 * INTERFACE) + 10 * 10 * ADDRESS


def test_more_ranks_and_more_hosts_take_longer():
    for jobs in ([Job.even(n, 8) for n in (2, 8, 64, 4096)], [Job.even(8, n) for n in (1, 2, 8, 64)]):
        times = [start_up(job, Machine()).total for job in jobs]
        assert times == sorted(set(times))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.hosts}x{job.ranks[0]}")
def test_a_rank_asks_the_server_seldom(job):
    """Some looks in each of 7 topics, however many ranks."""
    machine = Machine(byte=0.0, connect=0.0)
    assert 7 < start_up(job, machine).server / machine.operation / job.size - 14 - HEARD < 7 * 12


def test_hosts_of_one_machine_share_its_cores():
    job, machine = Job.even(4, 16), Machine(cores=2)
    apart, together = start_up(job, machine), start_up(job, replace(machine, shared=True))
    assert together.processes == 4 * apart.processes and together.mpi == 4 * apart.mpi
    assert together.server == apart.server
    assert start_up(Job.even(4, 1), machine).processes == machine.process  # a core for each


def measured(truth):
    jobs = [Job.even(4, n) for n in (2, 4, 8, 16)]
    return [Point(job, start_up(job, truth).total, start_up(job, truth).mpi) for job in jobs]


def test_a_fit_finds_the_parameters():
    truth = Machine(process=0.3, mpi=0.05, cores=2, shared=True)
    found = fit(measured(truth), replace(truth, process=1.0, mpi=1.0))
    assert (found.process, found.mpi) == (pytest.approx(0.3), pytest.approx(0.05))


def test_the_command(tmp_path):
    truth = Machine(operation=3e-5, byte=2e-9, process=0.3, mpi=0.05, cores=2, shared=True)
    runs = [{"hosts": p.job.ranks, "seconds": p.seconds, "mpi_seconds": p.mpi_seconds} for p in measured(truth)]
    (tmp_path / "it.json").write_text(json.dumps({"operation": 3e-5, "byte": 2e-9, "cores": 2, "runs": runs}))
    command = [
        "model",
        "--start-up",
        tmp_path / "it.json",
        "--hosts",
        "2,512",
        "--ranks-per-host",
        "8",
        "--then",
        "cores=4",
    ]
    out = subprocess.run([*OWN_BENCH, *command], text=True, capture_output=True, timeout=200, check=True).stdout
    assert out.count("+0%") + out.count("-0%") == 4 and "4 cores per host" in out
    in_all = float(out.splitlines()[-1].split()[5])
    real = replace(truth, byte=Machine.byte, cores=4, shared=False)
    assert in_all == pytest.approx(start_up(Job.even(512, 8), real).total, abs=0.01)
