"""`scripts/bench machine` keeps to its time, says what did not fit it, and prints a page; its figures are nobody's
business here."""

import json
import sys

import pytest

from bench import machine, machine_part
from unit.bench_cases import OWN_BENCH, run


def cpus(*groups):
    """(cores, cache, node, socket, bytes of the cache) of each cache."""
    made = []
    for count, cache, node, socket, nbytes in groups:
        for _ in range(count):
            place = {"cpu": len(made), "cache": cache, "node": node, "socket": socket, "cache_bytes": nbytes}
            made.append(place)
    return made


MB = 1 << 20


@pytest.mark.parametrize(
    "places, text",
    [
        (
            cpus((56, 0, 0, 0, 105 * MB), (56, 1, 1, 1, 105 * MB)),
            "112 cores for this process, 2 sockets, 2 NUMA nodes; last-level caches: 2 x 105 MB for 56 cores",
        ),
        (
            cpus(*((8, i, 0, 0, 32 * MB) for i in range(7)), (4, 7, 0, 0, 32 * MB)),
            "60 cores for this process, 1 socket, 1 NUMA node; last-level caches: 7 x 32 MB for 8 cores, 1 x 32 MB for "
            "4 cores",
        ),
        (
            cpus((1, 0, 0, 0, 0)),
            "1 core for this process, 1 socket, 1 NUMA node; last-level caches: 1 x of unknown size for 1 core",
        ),
    ],
)
def test_topologies_in_words(places, text):
    assert machine.topology_text(places) == text


def test_ranks_double_up_to_the_cores():
    assert machine.rank_counts(1) == [2]
    assert machine.rank_counts(16) == [2, 4, 8, 16]
    assert machine.rank_counts(192) == [2, 4, 8, 16, 32, 64, 128, 192]


def test_every_case_is_there_once_and_the_published_ones_come_first():
    every = machine.cases()
    assert len(set(every)) == len(every)
    first = every[: 1 + 3 * 5]
    assert all((operation, nbytes) in first for operation, nbytes, *_ in machine.PUBLISHED)
    for operation in ("all_reduce", "all_gather", "all_to_all"):
        sizes = [nbytes for each, nbytes in every if each == operation]
        assert min(sizes) == 4 and max(sizes) == 64 * MB


def test_a_call_is_expected_to_take_more_in_proportion_from_a_page_up():
    estimates = machine_part._Estimates()
    assert estimates.of("gloo", "all_reduce", MB) == 0
    estimates.add("gloo", "all_reduce", 4, 1e-5)
    assert estimates.of("gloo", "all_reduce", 4096) == 1e-5
    assert estimates.of("gloo", "all_reduce", MB) == pytest.approx(256e-5)
    estimates.add("gloo", "all_reduce", MB, 1e-3)
    assert estimates.of("gloo", "all_reduce", 2 * MB) == pytest.approx(2e-3)
    assert estimates.of("gloo", "all_reduce", 4096) == 1e-5
    assert estimates.of("mpi", "all_reduce", MB) == 0 == estimates.of("gloo", "all_gather", MB)


def test_the_page_has_times_ratios_and_what_they_are_to_be_held_against():
    def row(operation, nbytes, ranks, reference, us):
        return {"operation": operation, "bytes": nbytes, "ranks": ranks, "reference": reference, "median_us": us}

    results = [
        row("all_reduce", 32 * MB, 2, "custom", 5000),
        row("all_reduce", 32 * MB, 2, "gloo", 20000),
        row("all_reduce", 32 * MB, 4, "custom", 8000),
        row("barrier", 0, 4, "custom", 2.5),
    ]
    text = machine.page([2, 4], results, ["a note"])
    lines = [line.split() for line in text.splitlines()]
    assert ["32", "MB,", "us", "5000.0", "8000.0"] in lines
    assert ["32", "MB,", "x", "gloo", "4.00", "-"] in lines
    assert ["us", "-", "2.5"] in lines
    assert "32 MB: 650 us" in text and "here: 2 ranks 5000 us, 4 ranks 8000 us" in text
    assert "64 KB: 28 us" in text and "here: not timed" in text
    assert text.endswith("\na note")


def test_a_run_of_little_time(tmp_path):
    written, picture = tmp_path / "run.json", tmp_path / "run.png"
    out = run([*OWN_BENCH, "machine", "-r", "2", "--limit", "30", "--json", str(written), "--plot", str(picture)])
    assert out.returncode == 0, out.stderr
    assert "cores for this process" in out.stdout and "to hold it against" in out.stdout
    found = json.loads(written.read_text())
    assert len(found["topology"]) >= 1 and found["limit"] == 30 and len(found["published"]) == 3
    assert {r["ranks"] for r in found["results"]} == {2}
    assert ("barrier", "custom") in {(r["operation"], r["reference"]) for r in found["results"]}
    for result in found["results"]:
        assert 0 < result["min_us"] <= result["median_us"]
    # What is not among the results is said.
    done = {(r["operation"], r["bytes"]) for r in found["results"] if r["reference"] == "custom"}
    lacking = {operation for operation, nbytes in machine.cases() if (operation, nbytes) not in done}
    notes = "\n".join(found["notes"])
    assert all(f"2 ranks: no time for {operation}" in notes for operation in lacking), notes
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ranks_that_take_too_long_are_ended_and_what_they_wrote_is_kept(tmp_path):
    program = "import sys, time; open(sys.argv[-1], 'a').write('{\"median_us\": 1}\\n{\"half'); time.sleep(1000)"
    file = tmp_path / "results"
    status, _ = machine._run([sys.executable, "-c", program, str(file)], 5)
    assert status is None
    assert machine._read(str(file)) == [{"median_us": 1}]


def test_a_launched_process_is_refused():
    out = run([*OWN_BENCH, "machine"], RANK="0", WORLD_SIZE="1")
    assert out.returncode == 2 and "launches runs of its own" in out.stderr
