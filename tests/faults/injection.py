"""Random programs of collectives and messages with faults thrown in, each result checked against what one process
computes.

    scripts/soak --minutes 60 [--seed 1]        # all of it, in turns; on one host and over two emulated ones
    python tests/faults/injection.py rounds --ranks 3 --rounds 50 --seed 7

A round is a group, a program that all ranks draw alike, and one fault at random moments of it, at one rank: a signal
handler that raises, calls the group, or destroys it; a stop of its process; a fork; a look at its own descriptors.
Killed ranks are lost_ranks.py's and soak.py's, and over hosts mpi/test_faults.py's; the soak runs them in turns with
the rounds. What must hold: nothing hangs, no result is wrong, every exception is ours or the handler's, and where the
fault is harmless there is none."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(HERE.parent), str(HERE)) if path not in sys.path]

import torch
import torch.distributed as dist

from c10d_custom.errors import CustomBackendError, UsageError
from faults.steps import one_step
from harness.groups import group_with_timeout

FAULTS = ("none", "raises", "reenters", "destroys", "stops", "forks", "looks")
HARMLESS = ("none", "reenters", "stops", "forks", "looks")
TIMEOUT = timedelta(seconds=10)
STEPS = 40


class Raised(Exception):
    """By a handler."""


class Wrong(AssertionError):
    """A result."""


# --- a round, in one rank


def rounds(rank, size, seed, first, count, without=()):
    """{(fault, outcome): how often} of these rounds, none with a fault of `without`. Raises Wrong, and what nobody
    should see."""
    found, others = Counter(), dist.new_group(timeout=timedelta(seconds=60))
    faults = [f for f in FAULTS if f not in without]
    for number in range(first, first + count):
        rng = random.Random(f"{seed}.{number}")
        fault, victim = faults[number % len(faults)], rng.randrange(size)
        group = group_with_timeout(TIMEOUT)
        outcome = "all"
        injected = Fault(fault, rng, group, dist.get_rank() == victim)
        try:
            with injected:  # its handler may raise as soon as the timer is set
                for step in range(STEPS):
                    if wrong := one_step(rng, step, group):
                        raise Wrong(f"round {number}, {fault} at rank {victim}: {wrong}")
        except Raised:
            outcome = "raised"
            injected.ends()  # the others need not wait for what it did not call
        except (CustomBackendError, RuntimeError, ValueError) as error:
            # A future's error is a RuntimeError that quotes ours; a group that is destroyed is no group to torch
            # (ValueError).
            if fault in HARMLESS:
                raise
            outcome = type(error).__name__
        found[f"{fault}: {outcome}"] += 1
        found["calls of handlers"] += injected.calls
        dist.barrier(others)
        if not injected.destroyed:
            dist.destroy_process_group(group)
    return dict(found)


class Fault:
    """One kind of it, at a random moment, or at many until the end of the `with`."""

    def __init__(self, kind, rng, group, here):
        self._group, self._here, self.calls, self.destroyed, self._over = group, here, 0, False, False
        self._act = getattr(self, "_" + kind)
        self._delay, self._gap = rng.uniform(1e-4, 20e-3), rng.uniform(3e-4, 5e-3)
        self._before = None

    def __enter__(self):
        if self._here:
            self._before = signal.signal(signal.SIGALRM, self._handler)
            signal.setitimer(signal.ITIMER_REAL, self._delay)
        return self

    def __exit__(self, *_):
        if self._here:
            self._over = True  # a handler that comes now shall not set the timer again
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)

    def _handler(self, *_):
        if self._over:
            return
        self.calls += 1
        if self._act():
            signal.setitimer(signal.ITIMER_REAL, self._gap)  # once more; not by itself, since a handler may take longer

    def _none(self):
        return True

    def _raises(self):
        raise Raised

    def ends(self):
        self.destroyed = True
        dist.destroy_process_group(self._group)

    _destroys = ends

    def _reenters(self):
        """Another collective, where this thread is amid one: anywhere else it would be a call that the other ranks do
        not make."""
        lower = getattr(self._group, "_transport", None)
        if lower is not None and lower.interrupted_here():
            try:
                dist.all_reduce(torch.ones(3), group=self._group)
            except UsageError:
                return True
            raise Wrong("a collective on top of another was no error")
        return True

    def _stops(self):
        pid = os.getpid()
        waker = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -CONT {pid}"])
        os.kill(pid, signal.SIGSTOP)
        waker.wait()

    def _forks(self):
        child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(torch.ones(3), group=self._group)
                os._exit(1)
            except CustomBackendError:
                os._exit(0)
            finally:
                os._exit(2)
        if os.waitpid(child, 0)[1]:
            raise Wrong("a forked child could use the group")

    def _looks(self):
        """Any close of a descriptor of a file drops a process's POSIX locks on it."""
        for fd in os.listdir("/proc/self/fd"):
            try:
                if "memfd:c10d_custom" in os.readlink(f"/proc/self/fd/{fd}"):
                    os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
            except OSError:
                continue
        return True


# --- very many calls on top of others


def on_top(rank, size, calls):
    """Rank 0's handler calls the group again and again, wherever it comes: amid a collective it is refused, elsewhere
    it is one more of the same collectives, which is what the other ranks make. (refused, done, collectives)"""
    group, counts, chance = dist.new_group(timeout=timedelta(seconds=60)), Counter(), random.Random(calls)

    def checked(t):
        if t.tolist() != [float(size)] * 3:
            raise Wrong(f"{t.tolist()} of {size} ranks")

    def one():
        t = torch.ones(3)
        if counts["all"] % 3 == 2:
            dist.all_reduce(t, group=group, async_op=True).wait()
        else:
            dist.all_reduce(t, group=group)
        return t

    def handler(*_):
        try:
            for _ in range(chance.randrange(1, 200)):
                counts["all"] += 1
                try:
                    checked(one())
                    counts["done"] += 1
                    break
                except UsageError:
                    counts["refused"] += 1
        finally:
            if counts["all"] < calls:
                # Once, and now and then not so soon: the outer calls are to get on, on a busy machine too.
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(2e-6, 60e-6 if chance.random() < 0.97 else 2e-3))

    if rank == 0:
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        while counts["all"] < calls:
            t = torch.ones(3)
            dist.all_reduce(t, group=group)
            checked(t)
            counts["outer"] += 1
        signal.signal(signal.SIGALRM, before)
        dist.all_reduce(torch.full((3,), 1e6), group=group)  # the last
    else:
        while True:
            if counts["outer"] % 1000 == 999:
                time.sleep(0.25)  # rank 0 waits in the core, which lets handlers run every 0.1 s
            t = torch.ones(3)
            dist.all_reduce(t, group=group)
            if t[0] > 1e5:
                break
            checked(t)
            counts["outer"] += 1
    dist.destroy_process_group(group)
    return counts["refused"], counts["done"], counts["outer"]


# --- by command


def _rounds(given):
    from ecosystem.spawn import run

    by_rank = run(rounds, given.ranks, given.seed, 0, given.rounds, deadline=30 + 15 * given.rounds)
    print(json.dumps({"rounds": given.rounds, "ranks": given.ranks, "outcomes": by_rank}))


def _on_top(given):
    from ecosystem.spawn import run

    by_rank = run(on_top, given.ranks, given.calls, deadline=60 + given.calls * 2e-3)
    print(json.dumps({"ranks": given.ranks, "refused, done, collectives": by_rank}))


def _soak(given):
    """Pieces in turns, each a process of its own with a seed of its own; stops at the first that fails."""
    from harness import Layout

    over_hosts = Layout.parse("2+2").why_not()
    if over_hosts:
        print(f"not over hosts: {over_hosts}")
    began, number, totals = time.monotonic(), 0, Counter()
    while time.monotonic() < began + 60 * given.minutes:
        rng = random.Random(f"{given.seed}.{number}")
        seed = rng.getrandbits(31)
        host = {k: v for k, v in os.environ.items() if k != "C10D_TEST_JOB"}
        hosts = {**host, "C10D_TEST_JOB": "2+2"}
        pieces = [
            (host, ["injection.py", "rounds", "--ranks", rng.choice("234"), "--rounds", "150"]),
            (host, ["lost_ranks.py", "--trials", "60"]),
            (host, ["soak.py", "--minutes", "0.5", "--life", "1"]),
        ]
        if not over_hosts:
            pieces.insert(1, (hosts, ["injection.py", "rounds", "--ranks", rng.choice("234"), "--rounds", "60"]))
            pieces.insert(2, (host, ["../mpi/test_faults.py", "-k", "dies"]))
            pieces.insert(3, (host, ["../mpi/kills.py", "--kills", "10"]))
        for environment, (script, *arguments) in pieces:
            where = environment.get("C10D_TEST_JOB", "one host")
            if "/test_" in script:
                where, command = "over hosts", ["-m", "pytest", "-q", HERE / script, *arguments]
            else:
                command = [HERE / script, *arguments, "--seed", str(seed)]
            done = subprocess.run([sys.executable, *command], env=environment, text=True, capture_output=True)
            said = done.stdout.strip().splitlines()[-1:] or [""]
            print(f"{time.monotonic() - began:7.1f} s  {where}, {' '.join(map(str, command))}: {said[0]}", flush=True)
            totals[f"{where}, {Path(script).name}"] += 1
            if done.returncode:
                print(done.stdout[-20000:], done.stderr[-20000:], sep="\n", file=sys.stderr)
                sys.exit(1)
        number += 1
    print(json.dumps({"seconds": round(time.monotonic() - began), "seed": given.seed, "pieces": totals}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for name, function, options in (
        ("rounds", _rounds, {"ranks": 3, "rounds": 50, "seed": 1}),
        ("on_top", _on_top, {"ranks": 2, "calls": 100_000}),
        ("soak", _soak, {"minutes": 60.0, "seed": 1}),
    ):
        command = commands.add_parser(name, help=(function.__doc__ or "").strip() or None)
        for option, default in options.items():
            command.add_argument(f"--{option}", type=type(default), default=default)
        command.set_defaults(function=function)
    given = parser.parse_args()
    given.function(given)


if __name__ == "__main__":
    # By its name, so that the ranks find the functions in a module that they can import.
    import faults.injection

    faults.injection.main()
