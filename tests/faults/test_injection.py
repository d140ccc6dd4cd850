"""A short run of the fault injection; scripts/soak makes long ones."""

import os

import pytest

from ecosystem.spawn import run
from harness import Layout

from .injection import on_top, rounds
from .locks import watched
from .test_ended_in_a_handler import destroyed

SEED = int(os.environ.get("SOAK_SEED", "1"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_with_faults(size):
    count = 12 if Layout.chosen() else 36 if size == 2 else 21
    found = run(rounds, size, SEED + size, 0, count, deadline=400)
    print(f"seed {SEED + size}: {found}")
    for outcomes in found:
        assert sum(n for what, n in outcomes.items() if ":" in what) == count
    assert any(what.startswith("raises: ") and not what.endswith("all") for outcomes in found for what in outcomes), (
        found
    )


@pytest.mark.timeout(300)
def test_very_many_calls_on_top_of_others():
    calls = 2_000 if Layout.chosen() else 20_000
    (refused, done, _), *_ = run(on_top, 2, calls, deadline=200)
    assert refused + done >= calls and refused and done, (refused, done)


def locks_taken(rank, size, seed):
    with watched() as seen:
        # Watched locks are written in Python, and a handler that raises may leave one taken; a real one it cannot.
        rounds(rank, size, seed, 0, 30, without=("raises",))
        on_top(rank, size, 3_000)
        destroyed(rank, size, seed, 20)
    seen.require_order()
    return sorted(seen.started_under), sorted(seen.taken), {outer: sorted(inner) for outer, inner in seen.order.items()}


@pytest.mark.timeout(300)
def test_locks_are_taken_in_one_order_and_not_held_while_a_thread_starts():
    for started_under, taken, order in run(locks_taken, 2, SEED, deadline=240):
        print(taken, order)
        assert not started_under, started_under
        assert any(name.startswith("c10d_custom.c10d.work:") for name in taken), taken
