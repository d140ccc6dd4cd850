"""This process's use of MPI, by way of mpi4py: one per process, begun by the first `job()`.

Every wait here polls, with a deadline: blocking calls of MPI have none, and burn a core."""

from __future__ import annotations

import _sitebuiltins
import atexit
import contextlib
import ctypes
import functools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import TransportError
from . import launcher

if TYPE_CHECKING:
    from types import TracebackType


SPIN_SECONDS = 200e-6
SHORTEST_SLEEP, LONGEST_SLEEP = 50e-6, 1e-3
CHECK_SECONDS = 1e-3
_FORWARD_SECONDS = 0.2  # for the launcher to forward what was written, before Abort ends it too
INSTALL = 'pip install "c10d-custom[mpi]"'
# What one MPI message carries at most. Larger ones are slower with MPICH, and none may pass 2^31 - 1.
PIECE = 256 << 10
_HEADER = 4 << 10  # more than Open MPI's own

_lock = threading.Lock()
_job: Job | None = None
_init: threading.Thread | None = None  # the thread in which MPI starts
_ours_to_end = False
_abandoned = False
_exit_status = 0  # what this process is about to exit with, if it is to abort the job


@dataclass(frozen=True)
class Job:
    """All ranks that the launcher started. ``world`` is COMM_WORLD itself, whose errors are exceptions."""

    MPI: Any
    world: Any
    rank: int
    size: int
    pid: int

    def wait_all(self, requests: Sequence[Any], deadline: float, check: Callable[[], None] | None = None) -> bool:
        """Waits until all are complete; False once time.monotonic() passes ``deadline``, and they are
        then still under way. ``check`` is called now and then, and may raise."""
        begun = checked = time.monotonic()
        pause = SHORTEST_SLEEP
        while not self._complete(requests):
            now = time.monotonic()
            if now >= deadline:
                return False
            if check is not None and now - checked >= CHECK_SECONDS:
                checked = now
                check()
            if now - begun < SPIN_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(pause, deadline - now))
                pause = min(2 * pause, LONGEST_SLEEP)
        return True

    def _complete(self, requests: Sequence[Any]) -> bool:
        try:
            return self.MPI.Request.Testall(requests)
        except self.MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error


def job(seconds: float | None = None) -> Job:
    """The process's Job; the first call initialises MPI unless the program has, which takes until all
    ranks do: TransportError after ``seconds``. Any thread may call."""
    global _job
    with _lock:
        if _job is None:
            _job = _begin(seconds)
    if _job.pid != os.getpid():
        raise TransportError(
            "a forked child cannot use its parent's MPI: start it with spawn, and not as a rank of the job"
        )
    if _job.MPI.Is_finalized():
        raise TransportError("MPI has been finalized in this process; it cannot start again")
    return _job


def _begin(seconds: float | None) -> Job:
    MPI = _import()
    if MPI.Is_finalized():
        raise TransportError("MPI has been finalized in this process; it cannot start again")
    ours = _init is not None or not MPI.Is_initialized()
    if ours:
        _initialise(MPI, seconds)
    world = MPI.COMM_WORLD
    begun = Job(MPI, world, world.rank, world.size, os.getpid())
    for comm in (world, MPI.COMM_SELF):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    if begun.size > 1:
        _end_job_with_rank(begun)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TransportError(
            f"{_library(MPI)} gives less than MPI_THREAD_MULTIPLE, which this backend needs. "
            + (
                "Use a build of MPI that has it."
                if ours
                else 'The program initialised MPI before: let it ask for "multiple" (mpi4py.rc.thread_level), or '
                "leave it to us."
            )
        )
    found = launcher.detect()
    if found is not None and (found.rank, found.size) != (begun.rank, begun.size):
        raise TransportError(
            f"the launcher ({found.name}) says rank {found.rank} of {found.size}, but the MPI library says rank "
            f"{begun.rank} of {begun.size}: they do not belong together. Use the mpiexec of the library ("
            f"{_library(MPI)}), choose another library with MPI4PY_LIBMPI=/full/path/of/libmpi.so, or under Slurm "
            "another srun --mpi=... (srun --mpi=list)."
        )
    return begun


def _initialise(MPI: Any, seconds: float | None) -> None:
    """In a thread, because MPI's own wait for the other ranks has no end and hears no signal; by ctypes,
    because mpi4py's Init_thread holds the interpreter's lock meanwhile."""
    global _init
    if _init is None:
        # Open MPI over TCP: a message beyond its eager limit is agreed on first, and the agreement queues behind the
        # data that is under way to the same host.
        os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(PIECE + _HEADER))
        # UCX (MPICH's) over TCP: its 8 KiB buffers make many small writes and reads of a piece.
        for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
            os.environ.setdefault(name, str(PIECE))
        start = ctypes.CDLL(MPI.__file__).MPI_Init_thread
        arguments = (None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
        _init = threading.Thread(target=start, args=arguments, name="mpi-init", daemon=True)
        _init.start()
    _init.join(seconds)
    if _init.is_alive():
        raise TransportError(
            f"MPI did not start within {seconds:.0f} s, as it does only when all ranks of the job "
            "start it; did one fail before, or not call init_process_group?"
        )
    if not MPI.Is_initialized():
        raise TransportError("MPI failed to start; the reason is above")


def _import() -> Any:
    """mpi4py.MPI. Where nobody has imported it before, it is left to `_begin` to initialise, and to
    `_finalize` to end it; else mpi4py finalises at exit, unless the program told it otherwise."""
    try:
        import mpi4py
    except ImportError as error:
        raise TransportError(f"starting under an MPI launcher needs mpi4py and an MPI library: {INSTALL}") from error
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        if mpi4py.rc.finalize is None:
            global _ours_to_end
            mpi4py.rc.finalize, _ours_to_end = False, True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"mpi4py finds no MPI library ({'; '.join(str(error).splitlines())}): {INSTALL} brings one; "
            "MPI4PY_LIBMPI=/full/path/of/libmpi.so names another"
        ) from error
    return MPI


def abandon() -> None:
    """A rank is lost: MPI's Finalize would wait for it, and is left out when this process ends."""
    global _abandoned
    _abandoned = True


@atexit.register  # at import: exit handlers of the modules that use this one run before
def _finalize() -> None:
    if _ours_to_end and not _abandoned and not _exit_status and (MPI := sys.modules["mpi4py"].MPI).Is_initialized():
        if not MPI.Is_finalized():
            MPI.Finalize()


def _library(MPI: Any) -> str:
    return MPI.Get_library_version().splitlines()[0].strip(" \0")


# --- the end of a rank is the end of the job


def _end_job_with_rank(job: Job) -> None:
    """MPI's Finalize waits for all ranks, so a rank that fails would wait, at its exit, for those that
    wait for it. Hence an uncaught exception aborts the job at once, and sys.exit(code) other than 0
    aborts it, instead of finalising, when the interpreter has run its exit handlers."""
    sys.excepthook = functools.partial(_abort, job)
    _watch_exit(job)


def _alive(job: Job) -> bool:
    return job.pid == os.getpid() and not job.MPI.Is_finalized()


def _abort(job: Job, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # To sys.__stderr__: init_process_group wraps this hook with sys.stderr captured. The hook that was
    # there before is not called: it might wait, and the job with it.
    if not _alive(job):
        return sys.__excepthook__(kind, error, trace)
    with contextlib.suppress(Exception):
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.__stderr__.write(  # type: ignore[union-attr]
            f"{text}rank {job.rank} of {job.size} ({socket.gethostname()}, pid {job.pid}) "
            "ends the MPI job: uncaught exception above\n"
        )
    streams: tuple[Any, ...] = (sys.stdout, sys.__stdout__, sys.__stderr__)
    for stream in streams:
        with contextlib.suppress(Exception):
            stream.flush()
    time.sleep(_FORWARD_SECONDS)
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    job.world.Abort(code)
    os._exit(code)  # where Abort returns, while the launcher is still about to kill


def _watch_exit(job: Job) -> None:
    """Python tells no exit handler the code it exits with. But the interpreter reads the attribute
    ``code`` of a SystemExit that nobody caught, and does so when no Python frame is left. (A program
    that raises SystemExit itself escapes this: its rank waits in Finalize.)"""

    plain: Any = SystemExit.code  # what holds it

    class Exit(SystemExit):
        @property
        def code(self) -> Any:
            code = plain.__get__(self)
            try:
                sys._getframe(1)
            except ValueError:
                if code is not None and _alive(job):
                    # mpi4py, at the very end, aborts with this status.
                    global _exit_status
                    _exit_status = code if isinstance(code, int) else 1
                    job.MPI._set_abort_status(_exit_status)
            return code

        @code.setter
        def code(self, value: Any) -> Any:
            plain.__set__(self, value)

    Exit.__name__, Exit.__qualname__, Exit.__module__ = "SystemExit", "SystemExit", "builtins"

    def exit(status: Any = None, /) -> NoReturn:
        raise Exit(status)

    exit.__doc__ = sys.exit.__doc__
    sys.exit = exit
    _sitebuiltins.SystemExit = Exit  # type: ignore[attr-defined]  # what the builtins exit() and quit() raise
