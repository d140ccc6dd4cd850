"""CUDA tensors cross hosts staged, by the hierarchical CPU transport. The GPUs are simulated."""

from pathlib import Path

import pytest

from harness import Layout
from programs.launch import finish

pytestmark = pytest.mark.lane2

SCRIPT = Path(__file__).with_name("scripts") / "staged_hosts.py"


@pytest.mark.parametrize("hosts", ["2+2", "2+1"])
def test_two_hosts(hosts):
    layout = Layout.parse(hosts)
    if reason := layout.why_not():
        pytest.skip(reason)
    said = finish([SCRIPT], layout=layout, address=False, deadline=120).json_by_rank()
    assert sorted(said) == list(range(sum(layout.ranks_per_host)))
    for rank, answer in said.items():
        assert not answer["violations"], (rank, answer["violations"])
        mismatch = answer["result"].pop("mismatch")
        assert all(answer["result"].values()) and len(answer["result"]) >= 8, (rank, answer["result"])
        assert mismatch.startswith("CollectiveMismatchError") and "they differ in device" in mismatch, mismatch
