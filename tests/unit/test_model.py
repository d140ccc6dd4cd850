"""The simulator of many hosts: what must hold whatever its parameters, and that a fit finds them."""

import json
import math
from dataclasses import replace

import pytest

from bench.fit import FITTED, Point, errors, fit, read
from bench.model import (
    FLAT,
    Job,
    Machine,
    Settings,
    Stage,
    Training,
    bytes_leaving,
    efficiency,
    flat,
    hierarchical,
    pipeline,
    step,
)
from unit.bench_cases import OWN_BENCH, run

pytestmark = pytest.mark.lane2

MB = 1 << 20
# Only the wire costs anything: what is left of a prediction is the algorithm's traffic.
WIRE = Machine(alpha=0, message_cpu=0, copy=math.inf, memory=math.inf, sync=0, call=0)
HOSTS = [2, 3, 4, 7, 8, 64, 1000, 4096]


@pytest.mark.parametrize("per_host", [1, 4])
def test_two_hosts_need_the_wires_time_for_the_message(per_host):
    size = 64 * MB
    assert hierarchical(Job.even(2, per_host), WIRE, size) == pytest.approx(size / WIRE.beta, rel=0.01)
    fast_memory = replace(Machine(), beta=125e6)  # 1 Gbit/s, and the cores' work hidden behind it
    assert hierarchical(Job.even(2, per_host), fast_memory, size) == pytest.approx(size / 125e6, rel=0.03)


@pytest.mark.parametrize("hosts", HOSTS)
def test_many_hosts_need_twice_the_messages_time_at_most(hosts):
    size = 64 * MB
    least = 2 * (hosts - 1) / hosts * size / WIRE.beta
    assert hierarchical(Job.even(hosts, 4), WIRE, size) == pytest.approx(least, rel=0.01)
    assert flat(Job.even(hosts, 4), WIRE, size, "ring") >= least * 0.999
    assert flat(Job.even(hosts, 4), WIRE, size, "rabenseifner") >= least * 0.999


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("size", [9 << 10, MB, 10 * MB + 4])
def test_what_leaves_a_host_is_the_minimum(hosts, size):
    assert bytes_leaving(Job.even(hosts, 4), size) == pytest.approx(2 * (hosts - 1) / hosts * size)


@pytest.mark.parametrize("hosts", [2, 4, 64])
def test_what_flat_algorithms_send(hosts):
    size, ranks = 8 * MB, 4
    job = Job.even(hosts, ranks)
    sent = {name: sum(r.leaving * r.times for r in rounds(job, size)) for name, rounds in FLAT.items()}
    assert sent["rabenseifner"] == pytest.approx(2 * (hosts - 1) / hosts * size)  # nearest first: the minimum
    assert sent["ring"] == pytest.approx(2 * (hosts * ranks - 1) / (hosts * ranks) * size)
    assert sent["doubling"] == pytest.approx(math.log2(hosts) * ranks * size)


def test_on_one_host_nothing_leaves():
    assert bytes_leaving(Job((4,)), MB) == 0
    for rounds in FLAT.values():
        assert all(r.leaving == 0 for r in rounds(Job((4,)), MB))


@pytest.mark.parametrize("predict", [hierarchical, *(lambda *a, n=n: flat(*a, n) for n in FLAT), flat])
@pytest.mark.parametrize("job", [Job.even(2, 2), Job((3, 1)), Job.even(3, 1), Job.even(64, 8)])
def test_more_bytes_take_longer(predict, job):
    # Ours changes algorithm at Settings.small, where a few more bytes may gain: monotone on each side of it.
    for sizes in ([4, 64, 1024, 8192], [8196, 65536, MB, MB + 4, 2 * MB - 4, 2 * MB, 16 * MB, 64 * MB]):
        times = [predict(job, Machine(), s) for s in sizes]
        assert times == sorted(times) and times[0] > 0


@pytest.mark.parametrize("predict", [hierarchical, flat])
def test_small_messages_take_a_latency_for_each_doubling_of_hosts(predict):
    machine = Machine(alpha=100e-6)
    times = [predict(Job.even(2**k, 4), machine, 4) for k in range(1, 13)]
    added = [b - a for a, b in zip(times, times[1:])]
    assert all(100e-6 <= a <= 115e-6 for a in added), added
    assert predict(Job.even(5, 1), machine, 4) == pytest.approx(predict(Job.even(8, 1), machine, 4), rel=0.35)


def test_hosts_of_one_machine_share_its_cores():
    machine = Machine(beta=math.inf, alpha=0)
    apart, together = (hierarchical(Job.even(3, 2), replace(machine, shared=s), 16 * MB) for s in (False, True))
    assert together == pytest.approx(3 * apart, rel=0.1)


def test_the_pipeline_overlaps_stages_and_serves_one_chunk_at_a_time():
    chunks = [[Stage("cores", 2.0), Stage("wire", 3.0, after=10.0), Stage("other", 1.0)]] * 5
    assert pipeline(chunks, window=8) == 2 + 5 * 3 + 10 + 1  # the slowest stage is always busy
    assert pipeline(chunks, window=1) == 5 * (2 + 3 + 10 + 1)  # nothing overlaps
    assert pipeline([[Stage("cores", 2.0), Stage("cores", 1.0)]] * 4, window=8) == 4 * 3  # one resource: the sum
    assert pipeline([], window=8) == 0


def test_small_chunks_overlap_more_and_cost_more_calls():
    job, machine, size = Job.even(2, 4), replace(Machine(), beta=5e9), 16 * MB
    whole, cut, crumbs = (hierarchical(job, machine, size, Settings(chunk=c)) for c in (16 * MB, MB, 4096))
    assert cut < whole and cut < crumbs


def test_ddp_hides_what_fits_beside_the_backward_pass():
    training = Training(parameters=100 * MB, bucket=25 * MB, forward=1.0, backward=2.0)
    assert efficiency(lambda size: 0.0, training) == 1
    # The last bucket (24 of 100 MB) is ready when the backward pass is over.
    assert step(lambda size: size / MB * 0.01, training) == pytest.approx(3.0 + 0.24)
    assert step(lambda size: size / MB * 0.01, replace(training, overlap=0.0)) == pytest.approx(3.0 + 1.0)
    assert step(lambda size: size / MB, training) == pytest.approx(1.0 + 0.02 + 100)  # communication never rests


def synthetic(machine, reference, predict):
    jobs = [Job.even(n, r) for n in (2, 3, 4) for r in (1, 2)] + [Job((3, 1)), Job((4,))]
    return [
        Point(reference, job, size, predict(job, machine, size))
        for job in jobs
        for size in (4 << k for k in range(0, 25, 4))
    ]


@pytest.mark.parametrize("reference, predict", [("custom", hierarchical), ("mpi", flat)])
def test_a_fit_finds_the_parameters(reference, predict):
    truth = Machine(alpha=60e-6, beta=300e6, message_cpu=4e-6, copy=2e9, memory=6e9, sync=8e-6, call=9e-6, shared=True)
    points = synthetic(truth, reference, predict)
    found = fit(points, Machine(shared=True))
    assert max(abs(errors(points, found))) < 0.02
    for name in ("alpha", "beta", "memory", "copy"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.1), name


def test_a_fit_weighs_too_slow_and_too_fast_alike():
    job = Job.even(2, 1)
    points = [Point("custom", job, 64 * MB, hierarchical(job, WIRE, 64 * MB) * factor) for factor in (1 / 8, 8)]
    assert fit(points, WIRE, names=("beta",)).beta == pytest.approx(WIRE.beta, rel=0.05)


def test_a_fit_leaves_what_it_was_not_asked_for():
    points = synthetic(Machine(alpha=1e-4), "custom", hierarchical)
    found = fit(points, names=("alpha",))
    assert found.alpha == pytest.approx(1e-4, rel=1e-3) and replace(found, alpha=Machine.alpha) == Machine()
    assert "shared" not in FITTED


@pytest.fixture
def measured(tmp_path):
    """Files as bench --json writes them, with figures of a known machine."""
    truth, files = Machine(beta=125e6), []
    for hosts in (2, 3, 4):
        job = Job.even(hosts, 2)
        results = [
            {
                "operation": "all_reduce",
                "bytes": size,
                "reference": name,
                "median_us": predict(job, truth, size) * 1e6,
                "min_us": size,
            }
            for size in (4, 65536, MB, 16 * MB)
            for name, predict in (("custom", hierarchical), ("mpi", flat))
        ]
        results.append({"operation": "all_reduce", "bytes": 4, "reference": "gloo", "median_us": 1.0})
        results.append({"operation": "broadcast", "bytes": 4, "reference": "custom", "median_us": 1.0})
        files.append(tmp_path / f"{hosts}.json")
        files[-1].write_text(json.dumps({"hosts": [{"name": "h", "ranks": 2}] * hosts, "results": results}))
    return files


def test_only_all_reduce_of_what_has_a_model_is_read(measured):
    points = read(measured)
    assert len(points) == 3 * 4 * 2 and {p.reference for p in points} == {"custom", "mpi"}
    assert {p.seconds for p in read(measured, "min_us")} == {p.bytes / 1e6 for p in points}
    assert {p.job for p in points} == {Job((2, 2)), Job((2, 2, 2)), Job((2, 2, 2, 2))}


def model(*options):
    return run([*OWN_BENCH, "model", *options])


def test_the_command_compares_a_fit_with_what_was_measured(measured, tmp_path):
    out = model("--fit", *map(str, measured), "--hosts", "2,8", "--sizes", "4,1M")
    assert out.returncode == 0, out.stderr
    assert out.stdout.count("2+2+2+2 ") == 4 * 2
    assert "hierarchical: median error 0%" in out.stdout and "flat: median error 0%" in out.stdout


def test_the_picture(measured, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is matplotlib's")
    out = model("--fit", *map(str, measured), "--plot", str(tmp_path / "model.png"))
    assert out.returncode == 0, out.stderr
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    options = ["--hosts", "2", "--plot", tmp_path / "model.png"]
    out = run([*OWN_BENCH, "model", *options], PYTHONPATH=str(tmp_path))
    assert out.returncode == 1 and "pip install matplotlib" in out.stderr
