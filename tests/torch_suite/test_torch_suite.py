"""PyTorch's own tests of torch.distributed (DistributedTest, in the torch wheel), against this backend.

4 ranks, in processes that last for all tests: spawned on this host or, with --job, an MPI job over hosts. Tests that
ask for gloo get this backend under gloo's name (impersonation.py). expected.txt has every test and what is to become
of it, so that none is skipped unnoticed; `--backend gloo` shows that the first list is gloo's too.
"""

import re
from pathlib import Path

import pytest
import torch

from ecosystem.spawn import backend as chosen_backend
from ecosystem.spawn import close_all, kill_all
from ecosystem.spawn import run as run_on_ranks
from harness import Layout

from . import rank

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.15."), reason="expected.txt is of torch 2.15's suite"
)


def _expected():
    """{test: its heading}"""
    found, heading = {}, None
    for line in Path(__file__).with_name("expected.txt").read_text().splitlines():
        if match := re.fullmatch(r"\[(.*)\]", line):
            heading = match[1]
        elif line and not line.startswith("#"):
            assert line not in found, line
            found[line] = heading
    return found


EXPECTED = _expected()
SKIPPED = {
    name: heading.removeprefix("skipped: ") for name, heading in EXPECTED.items() if heading.startswith("skipped: ")
}
PASSED = [name for name in EXPECTED if name not in SKIPPED]


def run(function, *args, deadline):
    return run_on_ranks(function, rank.RANKS, *args, deadline=deadline, init=False)


@pytest.fixture(scope="module")
def upstream(full):
    """The names of upstream's tests. The ranks serve nobody else: torch's suite leaves its mark on a process."""
    if Layout.chosen() is None and not full:
        pytest.skip("on one host: --full; over hosts: tests/mpi/test_suites.py")
    close_all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield run(rank.names, deadline=120)[0]
        kill_all()


def test_each_of_upstream_s_tests_is_listed(upstream):
    assert sorted(EXPECTED) == sorted(upstream)


@pytest.mark.parametrize("name", PASSED)
def test_passes(name, upstream, tmp_path):
    ungated = EXPECTED[name] != "passes"
    if ungated and chosen_backend() == "gloo":
        pytest.skip("upstream does not ask it of gloo")
    reasons = run(rank.run, name, str(tmp_path), Layout.chosen() is not None, chosen_backend(), ungated, deadline=40)
    assert reasons == [None] * rank.RANKS


def test_the_others_are_skipped_for_the_reasons_listed(upstream, tmp_path):
    for reasons in run(rank.reasons, list(SKIPPED), str(tmp_path), deadline=60):
        assert reasons == SKIPPED
