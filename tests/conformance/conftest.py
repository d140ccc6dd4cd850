import pytest

from harness import Layout

from . import gloo
from .cases import check, members_of, run_cases
from .selection import cases_of, time_for

# How a tensor lies in memory is settled before ranks meet. Every way is tested at 2 and 4 ranks of one host, and
# `mixed` has them at 3 and 8 and over several hosts.
ONE_WAY_EACH = ("strided", "transposed", "offset", "scalar")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        chosen = item.callspec.params if hasattr(item, "callspec") else {}
        if (
            "conform" in getattr(item, "fixturenames", ())
            and (chosen.get("ranks") in (3, 8) or Layout.chosen() is not None)
            and chosen.get("section") in ONE_WAY_EACH
        ):
            item.add_marker(pytest.mark.full("how a tensor lies in memory is not about how many ranks there are"))
    if config.getoption("full"):
        for item in items:
            if "conform" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.timeout(0))  # the pool's own deadline grows with the cases


@pytest.fixture
def conform(ranks, backend, full):
    """conform(perform, section, reducing): run a section of the selection (see selection.py) on all ranks."""

    def run(perform, section, reducing=False):
        cases = cases_of(perform.__name__, section, reducing, full, ranks.world_size)
        if backend == "gloo":
            size = {name: len(members_of(name, ranks.world_size)) for name in ("world", "unsorted")}
            cases = [case for case in cases if not gloo.lacks(perform.__name__, case, size[case.members])]
            if not cases:
                pytest.skip("gloo can do none of these cases")
        check(ranks, run_cases, perform, cases, timeout=time_for(cases))

    return run


@pytest.fixture
def beyond_gloo(backend):
    """beyond_gloo(reason): skip the rest of a test where gloo cannot do it."""

    def skip(reason):
        if backend == "gloo":
            pytest.skip(f"gloo: {reason}")

    return skip
