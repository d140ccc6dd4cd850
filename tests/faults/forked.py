"""Ranks forked from a process that has imported torch and has no thread of its own: they start in milliseconds.

For scripts, not for pytest's process. Each rank says things by a pipe, as JSON; what it has not said when it ends, it
never will.
"""

import ctypes
import json
import os
import signal
import struct
import time
import traceback

import torch
import torch.distributed as dist

PR_SET_PDEATHSIG = 1
LIMIT = 60.0  # s: after which waiting for ranks is given up


def serve_store():
    """Port of a TCPStore in a process of its own (it has threads), which lives as long as this one."""
    read, write = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        _die_with(parent)
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(write, struct.pack("i", store.port))
        signal.pause()
    os.close(write)
    (port,) = struct.unpack("i", os.read(read, 4))
    os.close(read)
    return port


def store_at(port, name):
    """A client's view of it, apart from those of other names."""
    return dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False))


def _die_with(parent):
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class ForkedRanks:
    """target(rank, say, *args) in so many processes; ``said``: what each has said, a dict per rank. A target that
    raises says so under "raised"."""

    def __init__(self, size, target, *args):
        self.size, self.said, self.pids, self.codes = size, [], [], []
        self._target, self._args, self._pipes = target, args, []
        for _ in range(size):
            self.start()

    def start(self):
        """One more."""
        rank, parent = len(self.pids), os.getpid()
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _die_with(parent)
            os.close(ours)
            for pipe, _ in self._pipes:
                os.close(pipe)

            def say(**words):
                os.write(theirs, json.dumps(words).encode() + b"\n")

            code = 1
            try:
                torch.set_num_threads(1)
                self._target(rank, say, *self._args)
                code = 0
            except BaseException:
                say(raised=traceback.format_exc())
            os._exit(code)
        os.close(theirs)
        os.set_blocking(ours, False)
        self._pipes.append((ours, b""))
        self.pids.append(pid)
        self.codes.append(None)
        self.said.append({})

    def listen(self, until, seconds=LIMIT):
        """Takes in what the ranks say until ``until()``. False: not in that time."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, (pipe, rest) in enumerate(self._pipes):
                try:
                    rest += os.read(pipe, 1 << 16)
                except BlockingIOError:
                    continue
                *lines, rest = rest.split(b"\n")
                self._pipes[rank] = pipe, rest
                for line in lines:
                    self.said[rank].update(json.loads(line))
            if until():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(1e-3)

    def ended(self):
        """True when all have; ``codes``: their exit codes, None while running."""
        for rank, pid in enumerate(self.pids):
            if self.codes[rank] is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return None not in self.codes

    def finish(self, seconds=LIMIT):
        """Waits for all to end, kills those that do not; the ranks that had to be killed."""
        self.listen(self.ended, seconds)
        self.listen(lambda: True)
        stuck = [rank for rank, code in enumerate(self.codes) if code is None]
        for rank in stuck:
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        for pipe, _ in self._pipes:
            os.close(pipe)
        return stuck
