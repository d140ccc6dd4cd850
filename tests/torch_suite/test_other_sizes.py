"""PyTorch's own tests at 3 and 8 ranks, and under this backend's own name: whatever gloo passes with as many ranks
passes, as long as upstream lets a backend of that name run it."""

import pytest
import torch

from ecosystem.spawn import RanksFailed, close_all, kill_all
from ecosystem.spawn import run as run_on_ranks
from harness import Layout

from . import rank
from .test_torch_suite import EXPECTED

pytestmark = [
    pytest.mark.full("some five minutes for each size and name"),
    pytest.mark.skipif(not torch.__version__.startswith("2.15."), reason="expected.txt is of torch 2.15's suite"),
    pytest.mark.skipif(Layout.chosen() is not None, reason="--job: over hosts with 4 ranks"),
]
SECONDS = 60


def outcomes(size, asked, backend, names, folder):
    """{name: None if it passes, else why it is skipped or how it fails} of tests that ask for a backend called
    ``asked``."""
    close_all()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        for name in names:
            own = folder / f"{asked}-{backend}-{name}"
            own.mkdir()
            try:
                run_on_ranks(rank.configure, size, asked, init=False)
                reasons = run_on_ranks(
                    rank.run, size, name, str(own), False, backend, False, deadline=SECONDS, init=False
                )
                found[name] = next((f"skipped: {r}" for r in reasons if r), None)
            except RanksFailed as failure:
                found[name] = str(failure)
        kill_all()
    return found


@pytest.fixture(scope="module", params=[3, 4, 8], ids=lambda n: f"{n}ranks")
def passed_by_gloo(request, tmp_path_factory):
    """(number of ranks, the tests that gloo passes with so many)"""
    found = outcomes(request.param, "gloo", "gloo", EXPECTED, tmp_path_factory.mktemp("gloo"))
    return request.param, [name for name, why in found.items() if why is None]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("asked", ["gloo", "custom"])
def test_what_gloo_passes_passes(passed_by_gloo, asked, tmp_path):
    size, names = passed_by_gloo
    assert len(names) > 80
    found = outcomes(size, asked, "custom", names, tmp_path)
    wrong = {
        name: why for name, why in found.items() if why and not (asked == "custom" and why.startswith("skipped: "))
    }
    assert not wrong
    assert sum(why is None for why in found.values()) > 60
