"""The demo's training over two emulated hosts: the same bits whoever starts it."""

from pathlib import Path

import pytest

from harness import Layout
from programs.launch import AS_RANK, finish

pytestmark = pytest.mark.lane3

TRAINING = Path(__file__).with_name("scripts") / "demo_training.py"


@pytest.mark.parametrize(
    "counts", ["2+2", pytest.param("3+1", marks=pytest.mark.full("of hosts of unlike size: test_suites.py"))]
)
def test_the_same_training_by_torchrun_and_mpirun(counts, backend):
    said = {}
    for layout in map(Layout.parse, (counts, f"torchrun:{counts}")):
        if reason := layout.why_not():
            pytest.skip(reason)
        script = [TRAINING] if backend == "custom" else [AS_RANK, TRAINING]
        said[layout] = finish(script, layout=layout, address=False).json_by_rank()
    by_mpirun, by_torchrun = said.values()
    assert sorted(by_mpirun) == [0, 1, 2, 3] and all(one["same"] for one in by_mpirun.values())
    assert by_torchrun == by_mpirun
    assert all(later < earlier for one in by_mpirun.values() for earlier, later in zip(one["loss"], one["loss"][1:]))
