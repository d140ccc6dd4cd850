"""Ranks as one job, on this machine or over emulated hosts, as harness/spawned.py offers processes.

The launcher starts rank.py on every rank. It connects back through a socket in a folder that only we may enter:
sockets with a path reach across network namespaces, and the hosts share the file system. The kernel then tells
under which PID the machine knows the rank.
"""

import atexit
import os
import pickle
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing import current_process
from multiprocessing.connection import Connection
from pathlib import Path

from rig import Hosts
from rig.mpi import Mpi

from .marks import MARK, kill_marked
from .spawned import die_with

CONNECT_SECONDS = 60.0
END_SECONDS = 20.0  # for the launcher, once a rank has ended: some seconds on a busy machine

_rigs = {}


def rig_of(layout):
    """The hosts that jobs of this layout run on, kept until the tests end; None: this machine."""
    number = len(layout.ranks_per_host)
    if number == 1:
        return None
    if number not in _rigs:
        _rigs[number] = Hosts([f"host{letter}" for letter in "abcdefgh"[:number]]).__enter__()
        atexit.register(_rigs[number].__exit__)
    return _rigs[number]


def forwarded(environment):
    """The variables that a job's ranks are to have, also under a launcher that passes none to other hosts."""
    mine = ("C10D_", "MASTER_", "PYTHON", "OMP_", "GLOO_", "TORCH", "NCCL_", "CUDA_", "MPIR_CVAR_", "FI_")
    return [name for name in environment if name.startswith(mine) or name in ("PATH", "HOME")]


def launch(layout, arguments, environment, flags=(), **options):
    """Popen of a job whose ranks run python with these arguments; ``flags`` are the launcher's."""
    mpi, hosts, parent = Mpi.named(layout.mpi), rig_of(layout), os.getpid()
    environment = mpi.environment(environment)
    environment.setdefault("GLOO_SOCKET_IFNAME", "eth0" if hosts else "lo")
    environment["C10D_TEST_FIRST_HOST"] = hosts.addresses[hosts.names[0]] if hosts else "127.0.0.1"
    command = mpi.command(layout.ranks_per_host, [mpi.python, *arguments], hosts, forwarded(environment), flags)
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with(parent),
        **options,
    )


def end(launcher, mark):
    """Kill all of a job. What entered the login host for the launcher ends after it."""
    kill_marked(mark, spare=launcher.pid)
    try:
        launcher.wait(2)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


class JobFailed(AssertionError):
    pass


class JobRanks:
    def __init__(self, layout, target, args):
        self.layout = layout
        self.processes, self.connections, self.launcher = [], [], None
        self._mark = uuid.uuid4().hex
        self._folder = Path(tempfile.mkdtemp(prefix="job-"))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(self._folder / "socket"))
                listener.listen(layout.world_size)
                with open(self._folder / "output", "wb") as output:
                    self.launcher = launch(
                        layout,
                        [Path(__file__).with_name("rank.py"), self._folder / "socket"],
                        {**os.environ, MARK: self._mark},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        # For last_words()
                        flags=["-print-all-exitcodes"] if layout.mpi == "mpich" else [],
                    )
                self._welcome(listener, target, args)
        except BaseException:
            self.kill()
            raise

    def _welcome(self, listener, target, args):
        deadline = time.monotonic() + CONNECT_SECONDS
        found = {}
        listener.settimeout(0.5)
        while len(found) < self.layout.world_size:
            try:
                reached, _ = listener.accept()
            except TimeoutError:
                if self.launcher.poll() is not None or time.monotonic() > deadline:
                    raise JobFailed(
                        f"{len(found)} of {self.layout.world_size} ranks came up; "
                        f"launcher's exit code {self.launcher.returncode}{self.last_words()}"
                    ) from None
                continue
            pid, _, _ = struct.unpack("3i", reached.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            connection = Connection(reached.detach())
            connection.send((bytes(current_process().authkey), sys.path, pickle.dumps((target, args))))
            rank = connection.recv()
            found[rank] = (JobProcess(pid, self.launcher), connection)
        for rank in sorted(found):
            process, connection = found[rank]
            self.processes.append(process)
            self.connections.append(connection)

    def kill(self):
        if self.launcher:
            end(self.launcher, self._mark)
        for process in self.processes:
            process.await_reaping()
            process.close()
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def last_words(self):
        try:
            text = (self._folder / "output").read_text(errors="replace")
        except OSError:
            return ""
        return f"\n--- launcher: {text[-3000:]}" if text else ""


class JobProcess:
    """A rank, with the methods of multiprocessing's Process that pools use."""

    def __init__(self, pid, launcher):
        self.pid, self._launcher = pid, launcher
        self._fd = os.pidfd_open(pid)

    def join(self, timeout=None):
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            selector.select(timeout)

    def is_alive(self):
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            return not selector.select(0)

    @property
    def exitcode(self):
        """None while it runs, then the job's: only the launcher hears of the rank's own."""
        if self.is_alive():
            return None
        try:
            return self._launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def kill(self):
        try:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def await_reaping(self):
        """Killed, it stays a zombie until the first process of its host or machine has reaped it."""
        deadline = time.monotonic() + 2
        while os.path.exists(f"/proc/{self.pid}") and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self):
        os.close(self._fd)
