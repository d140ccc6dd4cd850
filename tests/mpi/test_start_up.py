"""A rank's part in making the first group over several hosts, MPI's start among it, does not grow with the job."""

import pytest

from bench.start_up import OPERATIONS, OPERATIONS_OF_A_FIRST, OPERATIONS_OF_RANK_0
from harness import Layout
from harness.job import rig_of

from .start_up import handed_out, operations, seconds, start_up

pytestmark = pytest.mark.lane3

LAYOUT = "torchrun:1+1+1+1"  # of which the hosts are meant
MOST_HANDED = 200  # bytes


@pytest.fixture(scope="module")
def hosts():
    layout = Layout.parse(LAYOUT)
    if reason := layout.why_not():
        pytest.skip(reason)
    return rig_of(layout)


@pytest.fixture(scope="module")
def few(hosts):
    return start_up(hosts, [2] * 4)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "size", [16, *(pytest.param(n, marks=pytest.mark.full("16 ranks show growth, too")) for n in (32, 64))]
)
def test_operations_on_the_store(hosts, few, size, record_property):
    each = [size // 4] * 4
    many = start_up(hosts, each)
    assert operations(many, each) == operations(few, [2] * 4)
    counted = {role: sum(sum(kinds.values()) for kinds in by.values()) for role, by in operations(few, [2] * 4).items()}
    model = {"rank 0": OPERATIONS_OF_RANK_0, "first of a host": OPERATIONS_OF_A_FIRST, "other": OPERATIONS}
    assert counted == model
    # Of what MPI's ranks tell each other, megabytes in a large job, one rank of a host fetches all, the others nothing.
    assert handed_out(many, each, "mpi")["other"] == handed_out(few, [2] * 4, "mpi")["other"] < MOST_HANDED
    # libmpi asks for it host by host.
    assert [one["asked"] for one in many[:: size // 4]] == [one["asked"] for one in few[::2]]
    record_property(
        "figures", f"{size} ranks had a group after {seconds(many)[0]:.1f} s, 8 after {seconds(few)[0]:.1f} s"
    )
