"""This process's MPI, by way of mpi4py: its start by the first `job()`, its waits, and its end, by MPI_Finalize or
without it.

Every wait here polls, with a deadline: blocking calls of MPI have none, and burn a core."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import os
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import TransportError
from ..extras import how_to_install
from ..native import over_hosts
from ..threads import OVER_MPI, socket, threading, time, wait_until
from . import launcher, leaving, libfabric, mapped_files, mpich_files
from .mpich_files import remove_files

if TYPE_CHECKING:
    from types import TracebackType

    from .pmi import PmiServer


_LOOK = 20e-3  # s: while MPI starts
_LINGER_SECONDS = 0.2  # for what is under way to other hosts, when a rank ends without Finalize
_FORWARD_SECONDS = 0.2  # for the launcher to forward what was written, before Abort ends it too
_FINALIZED = "MPI has been finalized in this process; it cannot start again"
INSTALL = how_to_install("mpi")
# What one MPI message carries at most. Larger ones are slower with MPICH, and none may pass 2^31 - 1.
PIECE = 256 << 10
_HEADER = 4 << 10  # more than Open MPI's own

_lock = threading.Lock()
_job: Job | None = None
_init: threading.Thread | None = None  # the thread in which MPI starts
_ours_to_end = False
# What `abandon` has been told: that a rank of this job is gone, or did not come in time.
_lost = _late = False
_used_again = False  # whether the ranks that are left have used MPI since the last `abandon`


@dataclass(frozen=True)
class Job:
    """All ranks that the launcher started; or, where none did, those for which MPI was started over a group's store.
    ``world`` is COMM_WORLD itself, whose errors are exceptions; ``server``: what libmpi takes for its launcher in a job
    of the second kind, with that job's name."""

    MPI: Any
    world: Any
    rank: int
    size: int
    pid: int
    server: PmiServer | None = None

    def wait_all(self, requests: Sequence[Any], deadline: float) -> bool:
        """Waits until all are complete; False once time.monotonic() passes ``deadline``, and they are
        then still under way."""
        try:
            return wait_until(lambda: self.MPI.Request.Testall(requests), OVER_MPI, deadline - time.monotonic())
        except self.MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error


def job(seconds: float | None = None, check: Callable[[], object] = lambda: None) -> Job:
    """The process's Job; the first call initialises MPI unless the program has, which takes until all
    ranks do: TransportError after ``seconds``. ``check``: called now and then meanwhile, and may raise. Any thread may
    call."""
    global _job
    with _lock:
        if _job is None:
            try:
                _job = _begin(seconds, check)
            except TransportError:
                remove_files()  # all have started, or will not
                if _init is None:
                    leaving.abort_at_exit()
                raise
    return _usable(_job)


def begun() -> Job | None:
    """The process's Job, where there is one already."""
    return None if _job is None else _usable(_job)


def has_begun() -> bool:
    """Whether this process, or the one that it is a fork of, has its Job."""
    return _job is not None


def _usable(job: Job) -> Job:
    if job.pid != os.getpid():
        raise TransportError(
            "a forked child cannot use its parent's MPI: start it with spawn, and not as a rank of the job"
        )
    if job.MPI.Is_finalized():
        raise TransportError(_FINALIZED)
    return job


def _begin(seconds: float | None, check: Callable[[], object]) -> Job:
    MPI = _import()
    if MPI.Is_finalized():
        raise TransportError(_FINALIZED)
    ours = _init is not None or not MPI.Is_initialized()
    if ours:
        _initialise(MPI, seconds, check)
    begun = _opened(MPI)
    if begun.size > 1:
        _abort_on_exceptions(begun)
    if not lacks_threads(begun):
        libfabric.drive(MPI)
    found = launcher.detect()
    if found is not None and (found.rank, found.size) != (begun.rank, begun.size):
        raise TransportError(
            f"the launcher ({found.name}) says rank {found.rank} of {found.size}, but the MPI library says rank "
            f"{begun.rank} of {begun.size}: they do not belong together. Use the mpiexec of the library "
            f"({_library(MPI)}), choose another library with MPI4PY_LIBMPI=/full/path/of/libmpi.so, or under Slurm "
            "another srun --mpi=... (srun --mpi=list)."
        )
    return begun


def _opened(MPI: Any, server: PmiServer | None = None) -> Job:
    """The Job of an MPI that has started."""
    world = MPI.COMM_WORLD
    for comm in (world, MPI.COMM_SELF):
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    over_hosts.lib.c10d_survive_refused_sends(*leaving.addresses(ctypes.CDLL(MPI.__file__), "MPI_Isend"))
    return Job(MPI, world, world.rank, world.size, os.getpid(), server)


def require_threads(job: Job) -> None:
    """Between hosts; where ranks of one host meet by MPI, any thread level does."""
    if why := lacks_threads(job):
        raise TransportError(why)


def lacks_threads(job: Job) -> str:
    """Why this MPI has too low a thread level for us; an empty string if it has not."""
    MPI = job.MPI
    if MPI.Query_thread() >= MPI.THREAD_MULTIPLE:
        return ""
    return f"{_library(MPI)} gives less than MPI_THREAD_MULTIPLE, which this backend needs between hosts. " + (
        "Use a build of MPI that has it."
        if _init is not None
        else 'The program initialised MPI before: let it ask for "multiple" (mpi4py.rc.thread_level), or leave it '
        "to us."
    )


def startable() -> str:
    """The MPI library that `start` would start, as it calls itself. TransportError: why it cannot."""
    MPI = _import()
    if _init is not None:
        raise TransportError("MPI was to start in this process before, and did not; it cannot begin again")
    if MPI.Is_finalized():
        raise TransportError(_FINALIZED)
    if MPI.Is_initialized():
        raise TransportError(
            "the program has initialised MPI itself, for this process alone, and it starts once: leave it to us. "
            "(`from mpi4py import MPI` initialises it, unless mpi4py.rc.initialize = False before.)"
        )
    library = _library(MPI)
    if "open mpi" in library.lower():
        raise TransportError(
            f"{library.partition(',')[0]} starts by its own mpirun only: "
            "start the job with that, or install another MPI, in an environment without this one (pip install mpich)"
        )
    return library


def start(server: PmiServer, seconds: float, interface: str | None, check: Callable[[], object]) -> Job:
    """The process's Job from now on, of the ranks of ``server``. Collective over them; after an error MPI cannot be had
    in this process. Raises what the server does; TransportError after ``seconds``. ``interface``: by which this host
    reaches others, where known; ``check``: as of `job`."""
    global _job
    with _lock:
        MPI = _import()
        deadline = time.monotonic() + seconds
        if "Intel" in _library(MPI):
            _find_providers()
        if interface is not None:
            # libfabric, of several interfaces, may take one by which others cannot be reached: a container bridge, say.
            for provider in ("TCP", "SOCKETS"):  # Intel MPI's, MPICH's
                os.environ.setdefault(f"FI_{provider}_IFACE", interface)
        try:
            with server.environment():
                init = _in_thread(MPI)
                server.serve(lambda: not init.is_alive() or time.monotonic() > deadline, check)
            if not MPI.Is_initialized():
                raise _not_started(seconds)
        except BaseException:
            remove_files()
            raise
        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (server.rank, server.size):
            raise TransportError(
                f"{_library(MPI)} did not ask for the other ranks by the protocol of MPICH's launcher (PMI-1): "
                "start the job with its own mpirun, or install MPICH or Intel MPI (pip install mpich)"
            )
        _job = _opened(MPI, server)
        require_threads(_job)
        server.go_on()
        MPI.Finalize = functools.partial(_finalize_unlocked, MPI)
        libfabric.drive(MPI)
    return _job


def _initialise(MPI: Any, seconds: float | None, check: Callable[[], object]) -> None:
    library = _library(MPI)
    if library.startswith("MPICH"):
        # Or it would share memory between the ranks of a host, beside us, which takes that they see each other's
        # processes and files, and /dev/shm. (Without a launcher we tell it who can: creation/libmpi_sharing.py.)
        os.environ.setdefault("MPIR_CVAR_NOLOCAL", "1")
    found = launcher.detect()
    mpich_files.prepare(1 if found is None else found.local_size or found.size, library)
    init = _in_thread(MPI)
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while init.is_alive() and (left := deadline - time.monotonic()) > 0:
        init.join(min(left, _LOOK))
        check()
    if not MPI.Is_initialized():
        raise _not_started(seconds)


def _in_thread(MPI: Any) -> threading.Thread:
    """The thread in which MPI starts, because its own wait for the other ranks has no end and hears no signal; by
    ctypes, because mpi4py's Init_thread holds the interpreter's lock meanwhile."""
    global _init
    if _init is None:
        # Open MPI over TCP: a message beyond its eager limit is agreed on first, and the agreement queues behind the
        # data that is under way to the same host.
        os.environ.setdefault("OMPI_MCA_btl_tcp_eager_limit", str(PIECE + _HEADER))
        # UCX (MPICH's) over TCP: its 8 KiB buffers make many small writes and reads of a piece.
        for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
            os.environ.setdefault(name, str(PIECE))
        libfabric.prepare(MPI.Get_library_version())
        start = ctypes.CDLL(MPI.__file__).MPI_Init_thread
        arguments = (None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int()))
        _init = threading.Thread(target=start, args=arguments, name="mpi-init", daemon=True)
        _init.start()
    return _init


def _find_providers() -> None:
    """Intel MPI's wheel has libfabric's providers beside the library, and its mpiexec says so."""
    for library in mapped_files(r"/.*/libmpi(_abi)?\.so[^/]*"):
        if os.path.exists(os.path.join(folder := os.path.dirname(library), "libtcp-fi.so")):
            os.environ.setdefault("FI_PROVIDER_PATH", folder)


def _not_started(seconds: float | None) -> TransportError:
    if _init is not None and _init.is_alive():
        return TransportError(
            f"MPI did not start within {seconds:.0f} s, as it does only when all ranks of the job start it; "
            "did one fail before, or not call init_process_group?"
        )
    return TransportError("MPI failed to start; the reason is above")


def _import() -> Any:
    """mpi4py.MPI. Where nobody has imported it before, it is left to `_begin` to initialise, and to
    `_finalize` to end it; else mpi4py finalises at exit, unless the program told it otherwise."""
    try:
        import mpi4py
    except ImportError as error:
        raise TransportError(f"MPI needs mpi4py and an MPI library: {INSTALL}") from error
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        if mpi4py.rc.finalize is None:
            global _ours_to_end
            mpi4py.rc.finalize, _ours_to_end = False, True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"mpi4py finds no MPI library ({'; '.join(str(error).splitlines())}): "
            f"{INSTALL} brings one; MPI4PY_LIBMPI=/full/path/of/libmpi.so names another"
        ) from error
    return MPI


def abandon(late: bool = False) -> None:
    """A rank is lost, or was not there in time and may never be: MPI's Finalize would wait for it."""
    global _lost, _late, _used_again
    _lost, _late, _used_again = _lost or not late, _late or late, False


def go_on(size: int) -> None:
    """So many ranks, those that are left, use MPI among themselves. Where that is all of them, they have come back, and
    end together."""
    global _used_again, _lost
    _used_again = True
    _lost = _lost and size < job().size


_at_finalize: int | None = None  # an attribute of COMM_SELF, which MPI_Finalize deletes first of all


def at_finalize(act: Callable[[], object]) -> None:
    """Has it called, once, when the program finalises MPI, which it still may use then."""
    global _at_finalize
    if _job is None or _at_finalize is not None:
        return

    def deleted(*_: object) -> None:
        if _at_finalize is not None:
            act()

    MPI = _job.MPI
    _at_finalize = MPI.Comm.Create_keyval(delete_fn=deleted)
    MPI.COMM_SELF.Set_attr(_at_finalize, True)


@atexit.register  # at import: exit handlers of the modules that use this one run before
def _finalize() -> None:
    global _at_finalize
    _at_finalize = None  # groups have ended by now, and Python is about to
    libfabric.stop()
    if _job is not None and _job.pid != os.getpid():
        return  # a forked child: MPI is its parent's
    if _job is not None and _job.server is not None:
        _end_own(_job, _job.server)
    elif _ours_to_end and (MPI := sys.modules.get("mpi4py.MPI")):
        if MPI.Is_initialized() and not MPI.Is_finalized():  # where it found no library there is no such module
            # Under Hydra nobody waits for a rank that is late; under others all do, as they would in Finalize.
            if not _lost and not (_late and leaving.hydra() is not None):
                _end_by_exit_code(MPI)
            elif _job is not None:
                if "PMIX_NAMESPACE" not in os.environ:  # Open MPI aborts where it finds that a peer has ended
                    _linger(_job)
                leaving.tell_launcher()


def _end_own(job: Job, server: PmiServer) -> None:
    """Of a job that no launcher has started, each rank ends by itself. Finalize is left out: Intel MPI's waits for the
    other ranks, and MPICH's over UCX ends the process if one of them has ended before. Who ends by an exception has
    nothing to deliver."""
    if (_used_again or not (_lost or _late)) and not job.MPI.Is_finalized():
        _linger(job)
    server.end(job.MPI.Is_finalized())


def _linger(job: Job) -> None:
    """Without Finalize. MPI may still hold what this rank has sent last, and moves it while it is called."""
    until = time.monotonic() + _LINGER_SECONDS
    with contextlib.suppress(job.MPI.Exception):
        while not hasattr(sys, "last_value") and time.monotonic() < until:
            job.world.Iprobe()
            time.sleep(OVER_MPI.often)


def _finalize_unlocked(MPI: Any) -> None:
    """MPI_Finalize, for programs that call it, without the interpreter's lock: mpi4py holds it, and our server needs
    it."""
    ctypes.CDLL(MPI.__file__).MPI_Finalize()


def _library(MPI: Any) -> str:
    return MPI.Get_library_version().splitlines()[0].strip(" \0")


# --- the end of a rank is the end of the job


def _end_by_exit_code(MPI: Any) -> None:
    """MPI_Finalize, or MPI_Abort if the process exits with another code than 0: Finalize waits for all ranks, and one
    that fails would wait, at its exit, for those that wait for it.

    Under Hydra each rank ends by itself, without Finalize: others may have left it out because of a failure in a group
    that this rank is not in, of which it has not heard, and it would wait for them for ever."""
    library = ctypes.CDLL(MPI.__file__)
    launcher = None
    if _job is not None and _job.size > 1 and (launcher := leaving.hydra()) is not None:
        _linger(_job)
        remove_files()
    functions = ("MPI_Finalize", "MPI_Abort", "MPI_Finalized", "MPI_Ibarrier", "MPI_Test")
    failed = ("MPIX_Comm_get_failed", "MPI_Group_size", "MPI_Group_free")
    how = [
        *leaving.addresses(library, *functions, *failed),
        *leaving.pmix(),
        MPI._handleof(MPI.COMM_WORLD),
        round(_FORWARD_SECONDS * 1e9),
        -1 if launcher is None else launcher,
    ]
    over_hosts.lib.c10d_end_mpi_at_exit(struct.pack(f"{len(how)}q", *how))


def _abort_on_exceptions(job: Job) -> None:
    """An uncaught exception ends the job at once, unless the program has a hook of its own for it: then when the
    interpreter has run its exit handlers."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = functools.partial(_abort, job)


def _abort(job: Job, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # To sys.__stderr__: init_process_group wraps this hook with sys.stderr captured.
    if job.pid != os.getpid() or job.MPI.Is_finalized():
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
