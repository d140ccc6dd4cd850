"""Ranks that die at random moments, and what the others hear of it.

    python tests/faults/lost_ranks.py --trials 1000 --seed 1 [--backend gloo]

A trial: 2 to 8 ranks run the same random program of collectives and messages, sync and async, small and large, and
check every result; one of them dies in one of several ways at a random moment, also while the group is being made.
Every survivor must raise an error that names it, soon, never see a wrong result, and have nothing left of the group
once it has destroyed it. Ranks are forked from this process, which has imported torch and has no group and no thread of
its own, and serves the store."""

import argparse
import json
import mmap
import os
import random
import re
import signal
import statistics
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from belongings import belongings, belongings_after
from forked import ForkedRanks, serve_store, store_at
from steps import one_step

# How a rank is lost. killed: by this process, at any moment. The others: by itself, in the middle of its program.
WAYS = ("killed", "exit", "segv", "exception", "creation")
LIMIT = 20.0  # s: a trial's longest; the group's time-out is longer
GROUP_TIMEOUT = 60.0
CREATION_TIMEOUT = 4.0  # of the group whose making a rank may miss altogether


@dataclass(frozen=True)
class Trial:
    number: int
    seed: int
    world_size: int
    victim: int
    way: str
    delay: float  # s after the start: killed, creation
    step: int  # of the victim's program: the other ways

    @classmethod
    def random(cls, number, seed, sizes):
        rng = random.Random(f"{seed}.{number}")
        world_size = rng.choice(sizes)
        way = rng.choice(WAYS)
        return cls(
            number,
            rng.getrandbits(32),
            world_size,
            rng.randrange(world_size),
            way,
            rng.uniform(0, 0.012 if way == "creation" else 0.08),
            rng.randrange(40),
        )


# --- one rank's program


def die(way, dead_at):
    struct.pack_into("d", dead_at, 0, time.monotonic())
    if way == "exit":
        os._exit(3)
    if way == "segv":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    raise RuntimeError("this rank fails")


def program(trial, rank, dead_at, say):
    rng = random.Random(trial.seed)
    for step in range(100_000):
        if rank == trial.victim and step == trial.step and trial.way in ("exit", "segv", "exception"):
            die(trial.way, dead_at)
        wrong = one_step(rng, step)
        if wrong:
            say(wrong=wrong)
            return


def rank_main(rank, say, trial, backend, port, start, dead_at):
    store = store_at(port, f"trial{trial.number}")
    early = trial.way == "creation"
    before = belongings()
    began = time.monotonic()
    try:
        if early:
            say(ready=True)
            os.read(start, 1)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=trial.world_size,
            timeout=timedelta(seconds=CREATION_TIMEOUT if early else GROUP_TIMEOUT),
        )
        if not early:
            say(ready=True)
            os.read(start, 1)
        program(trial, rank, dead_at, say)
    except Exception as error:
        at = time.monotonic()
        if rank == trial.victim:
            # As an uncaught exception ends a process: exit handlers run.
            import atexit

            atexit._run_exitfuncs()
            os._exit(1)
        again, asked = None, at
        if dist.is_initialized():
            time.sleep(0.3)  # a lost message ends no group: the others may still be in the collective before
            asked = time.monotonic()
            try:
                dist.all_reduce(torch.ones(1))
                again = "the next all_reduce returned"
            except Exception:
                again = None
        say(
            error=type(error).__name__,
            text=str(error),
            at=at,
            again=again,
            asked=asked,
            trace="" if isinstance(error, dist.DistError) else traceback.format_exc(),
            waited=at - began,
        )
    if dist.is_initialized():
        began = time.monotonic()
        dist.destroy_process_group()
        say(destroyed=time.monotonic() - began)
    after = belongings_after(before)
    say(left={what: after[what] - before[what] for what in before if after[what] != before[what]})


# --- the trials


class Run:
    """One trial's processes."""

    def __init__(self, trial, backend, port):
        self.trial = trial
        self.dead_at = mmap.mmap(-1, 4096)
        start_read, self._start = os.pipe()
        self._ranks = ForkedRanks(trial.world_size, rank_main, trial, backend, port, start_read, self.dead_at)
        os.close(start_read)

    @property
    def said(self):
        return self._ranks.said

    def go(self):
        trial = self.trial
        if not self._ranks.listen(lambda: all("ready" in said for said in self.said), LIMIT):
            return "the ranks did not start"
        os.write(self._start, b"g" * trial.world_size)
        if trial.way in ("killed", "creation"):
            time.sleep(trial.delay)
            struct.pack_into("d", self.dead_at, 0, time.monotonic())
            os.kill(self._ranks.pids[trial.victim], signal.SIGKILL)
        survivors = [said for rank, said in enumerate(self.said) if rank != trial.victim]
        self._ranks.listen(lambda: all("at" in said or "wrong" in said for said in survivors), LIMIT)
        return None

    def end(self):
        """Ranks that had to be killed. What they look through before they end takes long beside other work."""
        stuck = self._ranks.finish(LIMIT)
        os.close(self._start)
        return stuck


def pause(said, ranks):
    """How long this harness kept a survivor waiting, seconds: one that waits for a message of another survivor hears of
    the loss once that one, which heard before and rested (rank_main), calls again and finds the group of no use."""
    finder = re.search(r"found by rank (\d+)", said["text"])
    other = ranks[int(finder[1])] if finder else said
    return other["asked"] - other["at"] if other.get("asked", said["at"]) < said["at"] else 0.0


def judge(trial, run, problem, stuck, backend):
    """(what was wrong, the times from the death to the survivors' errors)"""
    if problem:
        return [problem], []
    died = struct.unpack_from("d", run.dead_at, 0)[0]
    wrong, times = [], []
    for rank, said in enumerate(run.said):
        if rank == trial.victim:
            continue
        if "raised" in said:
            wrong.append(f"rank {rank}: {said['raised']}")
        elif "wrong" in said:
            wrong.append(f"rank {rank}: {said['wrong']}")
        elif "at" not in said:
            wrong.append(f"rank {rank}: no error within {LIMIT:g} s")
        else:
            if trial.way == "creation" and said["waited"] > 0.9 * CREATION_TIMEOUT:
                times.append(None)  # it died before it had told anybody who it is
            else:
                times.append(said["at"] - died - pause(said, run.said))
            if f"rank {trial.victim}" not in said["text"] or said["error"] not in ("PeerLostError", "TransportError"):
                wrong.append(f"rank {rank}: {said['error']}: {said['text']} {said['trace']}")
            elif said["error"] == "TransportError" and trial.way != "creation":
                wrong.append(f"rank {rank}: {said['error']}: {said['text']}")
            if said["again"]:
                wrong.append(f"rank {rank}: {said['again']}")
            if said.get("destroyed", 0) > 1:
                wrong.append(f"rank {rank}: destroy_process_group took {said['destroyed']:.1f} s")
            if said.get("left", True) and backend == "custom":
                wrong.append(f"rank {rank}: left behind {said.get('left', 'nobody knows what')}")
    if stuck:
        wrong.append(f"still running at the end: ranks {stuck}")
    return wrong, times


def summary(times, trials, failures, backend):
    known = sorted(t for t in times if t is not None)
    ms = [1e3 * t for t in known] or [0.0]
    return {
        "backend": backend,
        "trials": trials,
        "failures": len(failures),
        "survivors": len(times),
        "unannounced": sum(t is None for t in times),
        "median_ms": round(statistics.median(ms), 2),
        "p99_ms": round(ms[int(0.99 * (len(ms) - 1))], 2),
        "worst_ms": round(ms[-1], 2),
    }


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trials", type=int, default=100)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--first", type=int, default=0, help="number of the first trial")
    options.add_argument("--backend", default="custom")
    options.add_argument("--ranks", default="2,3,4,5,6,7,8", help="world sizes to choose from")
    options.add_argument("--json", action="store_true", help="the summary and the failures as JSON")
    given = options.parse_args()
    torch.set_num_threads(1)
    port = serve_store()
    failures, all_times = [], []
    for number in range(given.first, given.first + given.trials):
        trial = Trial.random(number, given.seed, [int(n) for n in given.ranks.split(",")])
        run = Run(trial, given.backend, port)
        problem = run.go()
        wrong, times = judge(trial, run, problem, run.end(), given.backend)
        all_times += times
        if wrong:
            failures.append({"trial": str(trial), "wrong": wrong})
            if not given.json:
                print(f"{trial}\n  " + "\n  ".join(wrong), flush=True)
    result = {**summary(all_times, given.trials, failures, given.backend), "details": failures}
    print(json.dumps(result) if given.json else {k: v for k, v in result.items() if k != "details"})
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
