"""Every collective over two hosts and more, also in groups too large for collectives directly between all ranks, as if
2 were the most for those."""

from pathlib import Path

import pytest

from harness import Layout
from programs.launch import finish

pytestmark = pytest.mark.lane3

MANY = Path(__file__).with_name("scripts") / "many.py"


@pytest.mark.parametrize(
    "layout, most",
    [
        ("2+1+1", []),
        ("2+1+1", [2]),
        ("openmpi:1+2+2", []),
        *(
            pytest.param(layout, [2], marks=pytest.mark.full("2+1+1 has hosts of one rank and of more, too"))
            for layout in ("2+2", "3+1")
        ),
        pytest.param(
            "openmpi:2+2", [2], marks=pytest.mark.full("which ranks meet in which stage is the same with MPICH")
        ),
    ],
)
def test_collectives_and_disagreement(layout, most):
    layout = Layout.parse(layout)
    if reason := layout.why_not():
        pytest.skip(reason)
    said = finish([MANY, *most], layout=layout, address=False, deadline=120).json_by_rank()
    assert sorted(said) == list(range(layout.world_size))
    assert [value["wrong"] for value in said.values()] == [[]] * layout.world_size
    for value in said.values():
        assert "they differ in count" in value["mismatch"] and "float32[9]" in value["mismatch"], value
