"""Ranks under mpirun that go on after a failure end by themselves, whatever others have heard of it: MPI_Finalize would
wait for those that leave it out."""

import pytest

from harness import Layout
from programs.launch import start

from .installation import SCRIPTS
from .test_faults import SURVIVE


def run(layout, script, *arguments, flags=()):
    layout = Layout.parse(layout)
    if reason := layout.why_not():
        pytest.skip(reason)
    return start([SCRIPTS / script, *arguments], layout=layout, address=False, flags=flags, deadline=100)


LAYOUTS = ["2+2", "openmpi:2+2"]


@pytest.mark.parametrize("how", ["leaves", "aborts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_has_a_loss_from_its_neighbour_alone_ends_without_waiting_for_it(layout, how, tmp_path):
    result = run(layout, "late_news.py", tmp_path, how, flags=SURVIVE[Layout.parse(layout).mpi])
    ended = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"0", "1"} <= set(ended) <= {"0", "1", "2"}, (ended, str(result))
    assert set(ended.values()) == {"PeerLostError"}, ended


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_has_not_heard_of_a_time_out_in_a_group_of_others_ends_without_waiting_for_them(layout):
    result = run(layout, "late_in_a_small_group.py")
    assert result.code == 0 and not result.left_over, str(result)
    said = sorted(line for line in result.output.splitlines() if line.startswith("rank "))
    assert said == ["rank 0 timed out", "rank 1 heard nothing", "rank 2 heard nothing", "rank 3 heard nothing"], said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_is_at_its_end_does_not_wait_for_a_rank_that_dies_before_its_own(layout, tmp_path):
    result = run(layout, "dies_at_its_end.py", tmp_path, flags=SURVIVE[Layout.parse(layout).mpi])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"] and not result.left_over, str(result)


def test_a_program_that_finalizes_mpi_amid_a_group():
    result = run("1+1", "finalize.py")
    said = result.json_by_rank()
    assert result.code == 0 and not result.left_over and set(said) == {0, 1}, str(result)
    for one in said.values():
        assert all(told and told[0] == "AbortedError" and told[1] for told in one["told"].values()), one
