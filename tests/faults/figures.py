"""Figures of this folder's cases: disagreement, time-outs, abort.

    python tests/faults/figures.py [--trials 3] [disagreement timeouts abort]

How programs end is told by leaving.py, what survivors of lost ranks are told by lost_ranks.py.
"""

import argparse
import statistics
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # of the packages that ranks import, too

from faults import test_abort_and_leave as abort_cases
from faults import test_disagreement as disagreement_cases
from faults import test_stalled_ranks as stalled_cases
from faults.operations import COLLECTIVES
from harness import RankPool


def disagreement(pool, trials):
    """From the last rank's call to each rank's error."""
    seconds, failed = [], 0
    for _ in range(trials):
        for name in COLLECTIVES:
            by_rank = pool.run(
                disagreement_cases.disagreements,
                name,
                disagreement_cases.cases_of(name, pool.world_size, full=True),
                timeout=120,
            )
            for case in zip(*by_rank):
                last = max(began for began, _, _ in case)
                seconds += [ended - last for _, ended, _ in case]
                failed += any(wrong for _, _, wrong in case)
    return [("disagreement: from the last call to a rank's error", seconds, failed)]


def timeouts(pool, trials):
    """Beyond the time-out of a call for which a stopped rank does not come."""
    rows = []
    for kind in (*stalled_cases.WAYS, "short forms", "dist"):
        seconds, failed = [], 0
        for _ in range(trials):
            *waited, _ = pool.run(stalled_cases.every_way, kind)
            for rank, found in enumerate(waited):
                seconds += [took - stalled_cases.SECONDS for _, took, _, _ in found]
                failed += sum(bool(stalled_cases.problems(rank, *case, pool.world_size)) for case in found)
        rows.append((f"stopped rank, time-out by {kind}: beyond its {stalled_cases.SECONDS:g} s", seconds, failed))
    return rows


def abort(pool, trials):
    """From abort() on rank 0 to the release of its waiters, and of the others'."""
    here, there = [], []
    for _ in range(trials):
        mine, theirs, _ = pool.run(abort_cases.aborted, None)
        here += [m[2] - m[1] for m in mine]
        # Where they had disagreed before, the other waits for the table of who called what, not for us.
        there += [t[2] - m[1] for m, t in zip(mine, theirs) if m[0] != "mismatch"]
    return [
        ("abort: to the release of a waiter beside it", here, 0),
        ("abort: to the release of another rank's", there, 0),
    ]


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", nargs="*", help="default: all")
    options.add_argument("--trials", type=int, default=3)
    options.add_argument("--backend", default="custom")
    given = options.parse_args()
    pool = RankPool(3, given.backend)
    for figures in (disagreement, timeouts, abort):
        if given.what and figures.__name__ not in given.what:
            continue
        for name, seconds, failed in figures(pool, given.trials):
            ms = sorted(1e3 * s for s in seconds)
            print(
                f"{name:62} {len(ms):6} measured  {failed} wrong  median {statistics.median(ms):7.1f} ms  "
                f"99th {ms[int(0.99 * (len(ms) - 1))]:7.1f} ms  worst {ms[-1]:7.1f} ms",
                flush=True,
            )
    sys.exit(pool.close())


if __name__ == "__main__":
    main()
