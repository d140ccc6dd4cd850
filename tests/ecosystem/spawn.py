"""Run one function as ranks 0..n-1 in processes of their own, with a deadline.

    values = run(fn, 2, *arguments)      # fn(rank, world_size, *arguments)

Vocabulary. A *call* is one function run by every rank, inside a process group
of its own which is initialised before and destroyed after. A *crew* is a set of
processes that serves many calls of one world size, since importing torch costs
more than most calls. A crew that saw an exception or missed a deadline is
killed, because its groups may be out of step; the next call gets a new one.

Only the parent keeps time. Processes are spawned here, or are an MPI job over
hosts where a layout was chosen (harness/layout.py), the ranks split over them.
"""

import atexit
import faulthandler
import importlib
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from harness.job import JobRanks
from harness.layout import Layout
from harness.pool import SLOWER
from harness.rendezvous import Rendezvous
from harness.spawned import SpawnedRanks

START = 120.0  # seconds to import torch and the test's module, on a machine busy with other things
GRACE = 5.0  # seconds for the other ranks once one has raised
STACKS = 1.0  # seconds for the signal handlers to write stacks
GROUP_TIMEOUT = 20.0 * SLOWER  # below every deadline, so that the backend's own message comes first


class RanksFailed(AssertionError):
    pass


def backend():
    return os.environ.get("C10D_TEST_BACKEND", "custom")


def run(fn, world_size, *args, deadline=120.0, init=True):
    """Call fn(rank, world_size, *args) on every rank; what they returned, by rank.

    fn is a module-level function. With init=False it makes its own process
    group. Set C10D_TEST_FRESH=1 to give every call new processes.
    """
    __tracebackhide__ = True
    crew = _crews.pop(world_size, None) or _Crew(world_size)
    try:
        values = crew.call(fn, args, deadline, init)
    except BaseException:
        crew.kill()
        raise
    if os.environ.get("C10D_TEST_FRESH"):
        crew.close()
    else:
        _crews[world_size] = crew
    return values


def close_all():
    while _crews:
        _crews.popitem()[1].close()


def kill_all():
    """As close_all, without waiting for interpreters to end, which takes those that imported much some seconds."""
    while _crews:
        _crews.popitem()[1].kill()


_crews = {}
atexit.register(close_all)


def _reference(fn):
    """Where a rank finds fn: the folder that makes its module importable, the module, the name.

    Not left to pickle: under pytest's importlib mode that folder is not in sys.path.
    """
    path = pathlib.Path(sys.modules[fn.__module__].__file__).resolve()
    return str(path.parents[fn.__module__.count(".")]), fn.__module__, fn.__qualname__


class _Crew:
    def __init__(self, world_size):
        self.world_size = world_size
        self.calls = 0
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-"))
        layout = Layout.chosen()
        layout = layout and layout.of(world_size)
        self.rendezvous = Rendezvous(layout, backend(), self.folder)
        setup = (self.rendezvous, str(self.folder))
        self.ranks = JobRanks(layout, _serve, setup) if layout else SpawnedRanks(world_size, _serve, setup)
        self.processes, self.pipes = self.ranks.processes, self.ranks.connections

    def _stacks(self, rank):
        return self.folder / f"stacks-{rank}"

    def call(self, fn, args, deadline, init):
        """Two rounds: the ranks get ready (imports take unequal time), then they all go."""
        __tracebackhide__ = True
        self.calls += 1
        self._round(fn, (self.calls, *_reference(fn), args, init, backend()), START)
        return self._round(fn, "go", deadline)

    def _round(self, fn, message, deadline):
        __tracebackhide__ = True
        for pipe in self.pipes:
            try:
                pipe.send(message)
            except OSError:
                pass  # a rank that died is reported below, with its exit code
        replies = [None] * self.world_size
        began = time.monotonic()
        end = began + deadline * SLOWER
        waiting = set(range(self.world_size))
        failed = False
        while waiting and (left := end - time.monotonic()) > 0:
            ready = wait([self.pipes[r] for r in waiting], left)
            for rank in [r for r in waiting if self.pipes[r] in ready]:
                try:
                    replies[rank] = self.pipes[rank].recv()
                except (EOFError, OSError):
                    self.processes[rank].join(1)
                    replies[rank] = ("error", f"died with exit code {self.processes[rank].exitcode}")
                waiting.discard(rank)
                if replies[rank][0] == "error" and not failed:
                    failed = True
                    end = min(end, time.monotonic() + GRACE)
        if not waiting and not failed:
            return [value for _, value in replies]
        raise RanksFailed(self._report(fn, replies, waiting, time.monotonic() - began))

    def _report(self, fn, replies, waiting, seconds):
        for rank in waiting:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if waiting:
            time.sleep(STACKS)
        parts = [f"{fn.__qualname__} on {self.world_size} ranks of {backend()!r}, after {seconds:.1f} s:"]
        for rank, reply in enumerate(replies):
            if rank in waiting:
                continue
            if reply[0] == "error":
                stacks = self._stacks(rank)
                fatal = stacks.read_text(errors="replace") if stacks.exists() else ""
                same = next((r for r in range(rank) if replies[r] == reply), None)
                what = f" like rank {same}" if same is not None and not fatal else f":\n{reply[1]}{fatal}"
                parts.append(f"--- rank {rank} failed{what}")
            else:
                parts.append(f"--- rank {rank} ended well")
        for rank in sorted(waiting):  # after what failed: stacks are long
            stacks = self._stacks(rank).read_text(errors="replace")
            parts.append(f"--- rank {rank} had not ended; its stacks:\n{stacks}")
        return "\n".join(parts) + self.ranks.last_words()

    def close(self):
        for pipe in self.pipes:
            pipe.close()  # the ranks end at the end of the pipe
        end = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self):
        self.ranks.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(rank, world_size, pipe, rendezvous, folder):
    torch.set_num_threads(1)
    stacks_file = open(f"{folder}/stacks-{rank}", "w")
    faulthandler.enable(stacks_file)
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
    while True:
        try:
            number, root, module, name, args, init, backend_name = pipe.recv()
        except EOFError:
            return
        try:
            if root not in sys.path:
                sys.path.insert(0, root)
            fn = getattr(importlib.import_module(module), name)
            os.environ["C10D_TEST_BACKEND"] = backend_name
            pipe.send(("value", None))  # ready
            pipe.recv()  # go
            torch.manual_seed(1234)
            random.seed(1234)
            if init:
                rendezvous.join(backend_name, rank, world_size, GROUP_TIMEOUT, life=f"call{number}")
            value = fn(rank, world_size, *args)
            if dist.is_initialized():
                dist.destroy_process_group()
            reply = ("value", value)
        except BaseException:
            reply = ("error", traceback.format_exc())
        try:
            pipe.send(reply)
        except OSError:
            return
        except Exception:
            pipe.send(("error", "the returned value cannot be sent:\n" + traceback.format_exc()))
