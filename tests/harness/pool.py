"""A pool of rank processes, started once, that runs many cases.

Vocabulary. A *case* is one function called on every rank at the same time. A pool *generation* is
one set of processes with one initialised process group. A generation ends when a case raised on a
rank, ran out of time or lost a rank: the group may then be out of step, so the processes are
killed and the next case starts a new generation. Case functions that merely find wrong values
should return them: that costs no respawn.

The parent alone keeps time. Where the processes come from is not told here: spawned.py or, where a layout was
chosen (layout.py), job.py.
"""

import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler as _Pickler
from pathlib import Path
from unittest.mock import patch

from .job import JobRanks
from .layout import Layout
from .rank import extend_path
from .rendezvous import Rendezvous
from .spawned import SpawnedRanks

START_SECONDS = 120.0  # import torch and init_process_group, on a machine busy with other things
SLOWER = float(os.environ.get("C10D_TEST_SLOWER", 1))  # how many times as slow this machine is: an emulated one
GRACE_SECONDS = 8.0  # for the other ranks, once one rank has failed
STACK_SECONDS = 2.0  # for the signal handlers to write the stacks


class RankFailure(AssertionError):
    """What went wrong, rank by rank."""


def join_by_rank(texts):
    """One text from {rank: text}, naming the ranks; those with the same text together."""
    ranks = {}
    for rank in sorted(texts):
        ranks.setdefault(texts[rank], []).append(str(rank))
    return "\n".join(f"--- rank {', '.join(same)}: {text}" for text, same in ranks.items())


class RankPool:
    def __init__(self, world_size, backend, group_timeout=60.0, environment=None):
        """``environment``: variables of every generation, beside those that the parent has when one is started."""
        self.world_size, self.backend, self.group_timeout = world_size, backend, group_timeout * SLOWER
        self.environment = environment or {}
        layout = Layout.chosen()
        self.layout = layout and layout.of(world_size)  # None: spawned processes
        self._ranks, self._processes, self._connections = None, [], []

    def run(self, function, *args, timeout=None):
        """Call function(*args) on every rank; the list of what they returned, by rank. ``timeout``: 60 s, or what
        C10D_TEST_CASE_SECONDS says."""
        timeout = timeout or float(os.environ.get("C10D_TEST_CASE_SECONDS", 60))
        if not self._processes:
            self._start()
        # The path travels in front: the function's module is imported while it is unpickled.
        case = bytes(_Pickler.dumps((function, args)))
        return self._round(function.__qualname__, bytes(_Pickler.dumps((sys.path, case))), timeout)

    def ask_to_end(self):
        """Let the ranks begin to end; close() awaits it."""
        for connection in self._connections:
            try:
                connection.send_bytes(b"")
            except OSError:
                pass  # its exit code tells

    def close(self):
        """End the ranks in good order. Returns what was wrong with how they ended, or None."""
        if not self._processes:
            return None
        self.ask_to_end()
        deadline = time.monotonic() + 30
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        wrong = None
        if any(codes):
            wrong = f"exit codes of {self.world_size} ranks (None: still running): {codes}"
            for rank in range(self.world_size):
                wrong += self._log_tail(rank)
            wrong += self._ranks.last_words()
        self.discard()
        return wrong

    def discard(self):
        """Kill this generation; the next run() starts another."""
        if self._ranks:
            self._ranks.kill()
            shutil.rmtree(self._logs, ignore_errors=True)
        self._ranks, self._processes, self._connections, self._rendezvous = None, [], [], None

    def _start(self):
        self._logs = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._rendezvous = Rendezvous(self.layout, self.backend, self._logs)
        setup = (self.backend, self._rendezvous, self.group_timeout, str(self._logs / "rank"))
        with patch.dict(os.environ, self.environment):
            if self.layout:
                self._ranks = JobRanks(self.layout, _rank_main, setup)
            else:
                self._ranks = SpawnedRanks(self.world_size, _rank_main, setup)
        self._processes, self._connections = self._ranks.processes, self._ranks.connections
        self._round(f"init_process_group({self.backend!r})", None, START_SECONDS)

    def _round(self, what, message, timeout):
        """Send one message to every rank (None: nothing to send) and collect one answer from each."""
        started = time.monotonic()
        deadline = started + timeout * SLOWER
        pending, results, failures = {}, [None] * self.world_size, {}
        for rank, connection in enumerate(self._connections):
            pending[connection] = rank
            if message is not None:
                try:
                    connection.send_bytes(message)
                except OSError:
                    pass  # the rank is gone: reading from it says so
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    succeeded = False
                    value = f"died, exit code {self._processes[rank].exitcode}{self._log_tail(rank)}"
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if pending and not ready:
                for rank, stack in self._stacks(sorted(pending.values())).items():
                    failures[rank] = f"no answer after {time.monotonic() - started:.1f} s{stack}"
                break
        if failures:
            where = f", job {self.layout}" if self.layout else ""
            head = f"{what}, {self.world_size} ranks, backend {self.backend}{where}:\n"
            launcher = self._ranks.last_words()
            self.discard()
            raise RankFailure(head + join_by_rank(failures) + launcher)
        return results

    def _stacks(self, ranks):
        before = {rank: self._log(rank).stat().st_size if self._log(rank).exists() else 0 for rank in ranks}
        for rank in ranks:
            # A rank still inside its imports has no handler yet and dies of the signal: no loss.
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        return {rank: self._log_tail(rank, before[rank]) for rank in ranks}

    def _log(self, rank):
        return self._logs / f"rank{rank}"

    def _log_tail(self, rank, start=0):
        try:
            text = self._log(rank).read_bytes()[start:].decode(errors="replace")
        except OSError:
            return ""
        return "\n" + text[-6000:] if text else ""


def _rank_main(rank, world_size, connection, backend, rendezvous, group_timeout, log):
    # Everything the rank writes, a dying C++ runtime's last words included, goes to its own file.
    output = os.open(f"{log}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        import warnings

        import torch

        # torch 2.13 renames half of its collectives; the suite calls old and new names alike.
        warnings.simplefilter("ignore", FutureWarning)
        torch.set_num_threads(1)
        rendezvous.join(backend, rank, world_size, group_timeout)
        import torch.distributed as dist
    except BaseException:
        connection.send((False, traceback.format_exc()))
        return
    connection.send((True, None))
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(1)  # the parent has given this generation up
        if not message:
            break
        try:
            search_path, case = _Pickler.loads(message)
            extend_path(search_path)
            function, args = _Pickler.loads(case)
            answer = _Pickler.dumps((True, function(*args)))
        except BaseException:
            answer = _Pickler.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
    dist.destroy_process_group()
