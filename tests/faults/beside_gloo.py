"""The table of what ranks are told in docs/results, of gloo and of this backend by one harness.

    python tests/faults/beside_gloo.py [--backends gloo,custom] [--trials 1] [--json]

Each trial: three ranks make a group, with a time-out of 2 s, and get into one kind of trouble. Each rank's outcome is
one of
    named      an error with the words looked for (NAMED; of disagreement they are this backend's own)
    unnamed    another error
    returned   no error. Results are not looked at: some ranks' parts need nothing of the rank that is missing
    crashed    its process is gone
    waits      nothing, some seconds after the time-out
Disagreement, for which gloo checks little, may also write past the ends of tensors: "overrun". Ranks that are lost are
lost_ranks.py's.
"""

import argparse
import json
import mmap
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # of the packages that are imported, too

import torch
import torch.distributed as dist

from faults.forked import ForkedRanks, serve_store, store_at
from faults.operations import COLLECTIVES, Arena, Asked
from faults.test_disagreement import cases_of, otherwise

SIZE = 3
TIMEOUT = 2.0  # s, of the group
PATIENCE = 6.0  # s that a rank's outcome is waited for
ABORT_AFTER = 0.3  # s
NAMED = {"disagreement": r"they differ in", "stopped": r"[Rr]ank 2\b", "absent": r"[Rr]ank 2\b", "abort": r"abort"}


# --- one rank's trouble; returns the arena, if any, and when what it waits for happened


def disagreement(g, name, of_field, count, asynchronous, deviant):
    arena, call, asked = Arena(), COLLECTIVES[name][0], Asked(count, asynchronous=asynchronous)
    if g.rank() == deviant:
        call, asked = otherwise(call, asked, of_field)
    return arena, lambda: wait(call(g, arena, asked))


def stopped(g, name):
    if g.rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return None, lambda: wait(COLLECTIVES[name][0](g, Arena(), Asked()))


def absent(g, name):
    if g.rank() == 2:
        time.sleep(2 * PATIENCE)
    return None, lambda: wait(COLLECTIVES[name][0](g, Arena(), Asked()))


def abort(g, name):
    """Rank 0 aborts while it waits, and rank 1, too."""
    if g.rank() == 2:
        time.sleep(2 * PATIENCE)
    if g.rank() == 0:
        threading.Timer(ABORT_AFTER, g.abort).start()
    return None, lambda: wait(COLLECTIVES[name][0](g, Arena(), Asked()))


def wait(work):
    if work is not None:
        work.wait()


def rank_main(rank, say, backend, port, number, kind, case, over):
    dist.init_process_group(
        backend, store=store_at(port, f"trial{number}"), rank=rank, world_size=SIZE, timeout=timedelta(seconds=TIMEOUT)
    )
    g = dist.group.WORLD
    try:
        wait(COLLECTIVES[case[0]][0](g, Arena(), Asked()))
    except Exception as error:
        say(unsupported=str(error))
        return
    dist.barrier()
    say(ready=True)
    arena, call = KINDS[kind](g, *case)
    began = time.monotonic()
    try:
        call()
        outcome = "returned"
    except Exception as error:
        outcome = "named" if re.search(NAMED[kind], str(error)) else "unnamed"
    say(outcome=outcome, began=began, ended=time.monotonic())
    if arena:
        say(overrun="guards" in arena.written())
    while not over[0]:  # a rank that goes ends the others' waits
        time.sleep(0.01)


# --- trials

KINDS = {f.__name__: f for f in (disagreement, stopped, absent, abort)}


def cases(kind):
    for name, (_, fields) in COLLECTIVES.items():
        if kind != "disagreement":
            yield (name,)
            continue
        for case in cases_of(name, SIZE, False):
            yield (name, *case[:-1])


def trial(backend, port, number, kind, case):
    """Each rank's (outcome, seconds or None, overrun); None: the backend does not have the operation."""
    over = mmap.mmap(-1, 4096)
    ranks = ForkedRanks(SIZE, rank_main, backend, port, f"{backend}{number}", kind, case, over)
    expected = range(SIZE if kind == "disagreement" else SIZE - 1)

    def known():
        ranks.ended()
        return all("outcome" in s or "unsupported" in s or code is not None for s, code in zip(ranks.said, ranks.codes))

    def settled():
        ranks.ended()
        return all("outcome" in ranks.said[r] or ranks.codes[r] is not None for r in expected)

    ranks.listen(lambda: known() or all("ready" in s for s in ranks.said), 30.0)
    if any("unsupported" in s for s in ranks.said):
        found = None
    else:
        ranks.listen(settled, TIMEOUT + PATIENCE)
        last = max((s["began"] for s in ranks.said if "began" in s), default=0.0) + (kind == "abort") * ABORT_AFTER
        found = [
            (
                s.get("outcome", "waits" if ranks.codes[r] is None else "crashed"),
                s["ended"] - last if "ended" in s else None,
                s.get("overrun", False),
            )
            for r, s in enumerate(ranks.said)
            if r in expected
        ]
        for r, s in enumerate(ranks.said):
            if "raised" in s and r in expected:
                raise AssertionError(f"{backend}, {kind}, {case}, rank {r}: {s['raised']}")
    over[0] = 1
    for r, code in enumerate(ranks.codes):
        if code is None and "outcome" not in ranks.said[r]:
            os.kill(ranks.pids[r], signal.SIGKILL)
    ranks.finish(5.0)
    return found


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--backends", default="gloo,custom")
    options.add_argument("--trials", type=int, default=1, help="of each case")
    options.add_argument("--kinds", default=",".join(KINDS))
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    port, number, rows = serve_store(), 0, []
    for kind in given.kinds.split(","):
        for backend in given.backends.split(","):
            outcomes, seconds, trials, lacking, overruns = Counter(), [], 0, set(), 0
            for case in cases(kind):
                for _ in range(given.trials):
                    number += 1
                    found = trial(backend, port, number, kind, case) if case[0] not in lacking else None
                    if found is None:
                        lacking.add(case[0])
                        continue
                    trials += 1
                    overruns += any(overrun for *_, overrun in found)
                    outcomes.update(outcome for outcome, *_ in found)
                    seconds += [s for outcome, s, _ in found if outcome in ("named", "unnamed")]
            ms = sorted(1e3 * s for s in seconds) or [float("nan")]
            rows.append(
                {
                    "kind": kind,
                    "backend": backend,
                    "trials": trials,
                    "outcomes": dict(outcomes),
                    "overruns": overruns,
                    "median_ms": round(statistics.median(ms), 1),
                    "worst_ms": round(ms[-1], 1),
                    "lacking": sorted(lacking),
                }
            )
            if not given.json:
                told = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
                print(
                    f"{kind:13} {backend:7} {trials:4} trials: {told}{f', overruns {overruns}' if overruns else ''}; "
                    f"errors after {ms[len(ms) // 2]:.1f} ms (median), {ms[-1]:.1f} ms (worst)"
                    f"{'; has no ' + ', '.join(sorted(lacking)) if lacking else ''}",
                    flush=True,
                )
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
