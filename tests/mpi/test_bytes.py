"""The bytes that leave a host are the fewest that its operation needs."""

from pathlib import Path

import pytest

from harness import Layout
from programs.launch import finish

pytestmark = pytest.mark.lane3

COUNT = Path(__file__).with_name("scripts") / "count_bytes.py"
# Of S, for two hosts with 4 ranks each: what the other host needs of this one (the root is on the first).
FEWEST = {
    "all_reduce": (1, 1),
    "small all_reduce": (1, 1),
    "broadcast": (1, 0),
    "reduce": (0, 1),
    "all_gather": (0.5, 0.5),
    "reduce_scatter": (0.5, 0.5),
    "all_to_all": (2, 2),
}


def test_two_hosts_of_four_ranks():
    layout = Layout.parse("4+4")
    if reason := layout.why_not():
        pytest.skip(reason)
    said = finish([COUNT], layout=layout, address=False, deadline=120).json_by_rank()
    assert sorted(said) == [0, 4]
    for host, value in enumerate(said[r] for r in (0, 4)):
        for name, sent in value["sent"].items():
            # Headers of TCP and MPI, acknowledgements of what came the other way, the barriers: a few per cent.
            assert FEWEST[name][host] <= sent < FEWEST[name][host] + 0.08, (name, value)
