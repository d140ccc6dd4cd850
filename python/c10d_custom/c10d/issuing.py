"""How operations are issued on one group: at once or as a Work, alone or together, with which time-out. And how a group
ends: by itself, with the program's MPI, or with its process's interpreter.

Exit handlers of the program, registered before or after a group was made, and its `weakref.finalize`s find it as it
was. It closes in the exit handler of multiprocessing, before that joins the children of this process: a child that is
a rank, too, must not wait for this one. `import torch` registers that handler, earlier than most programs register
theirs, and what was registered later runs earlier. (A handler that was registered before `import torch` comes after the
group's end, and is told that the interpreter is ending.) A group over MPI ends before MPI does, and one
with CUDA tensors before what is loaded for them: before whatever has been registered until it was made."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import util
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import PrefixStore

from ..call import Op, seconds_of
from ..errors import UsageError
from ..lowering import (
    COUNTED,
    Lowering,
    check_one_device,
    count_changes,
    only,
    own_tensors,
    put_back,
    read_before_written,
)
from ..native import SLOW_PATH
from ..threads import threading
from ..transport import LocalTransport
from .torch_private import (
    amid_backward_pass,
    opaque_to_dynamo,
    posted_to_be_awaited,
    profiler_enabled,
    recorded,
    works_are_graph_inputs,
)
from .work import Completer, DeviceWork, DoneMessage, DoneWork, Work

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import Store

    from ..call import Call, Message
    from ..creation import Processes
    from ..recovery.regroup import Roster
    from ..transport import Ticket, Transport
    from ..transport.by_device import ByDevice
    from .ddp_buckets import Buckets
    from .window import Window


# The transports that trace_dump.py writes of, none where nothing asks for files. By id; iterated over in copies that
# take no lock, as a signal may come at any time.
traced: dict[int, weakref.ref[Transport]] = {}
stacks: dict[int, Any] = {}  # trace_dump.py's CallStacks, of those whose calls' stacks are remembered
written: set[int] = set()  # ids of those whose failure has been written


def forget(key: int) -> None:
    """From now on the transport of that id is traced no more."""
    traced.pop(key, None)
    stacks.pop(key, None)
    written.discard(key)


_PACKAGE = "c10d_custom."
_STEPS = tuple(_PACKAGE + name for name in ("c10d.issuing", "c10d.operations", "c10d.work", "transport"))


def on_top_of_own_step() -> bool:
    """Whether a signal handler has interrupted a step of this package, in the thread that asks: below the code that has
    called the package now, there is a step of it.

    Such a step may hold a lock, or be about to start a thread: who ends a group there, and waits for its threads, waits
    for itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module_of(frame).startswith(_PACKAGE):
        frame = frame.f_back
    while frame is not None and not _module_of(frame).startswith(_STEPS):
        frame = frame.f_back
    # A callback of a future runs where nothing is held.
    return frame is not None and frame.f_code.co_name != "_resolve"


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


# Of one operation, the type of c10d's options, and whether those have a rootRank, a reduceOp. A plain tuple, for each
# call takes it apart.
FastPath = tuple[Op, type[Any], bool, bool]

_PATIENCE = 50_000_000  # ns: how long a message is waited for before signal handlers have their turn
_AWAITED = DoneMessage([], -1)  # of dist.send and dist.recv, which only wait for it

_live: weakref.WeakSet[Issuing] = weakref.WeakSet()


def live() -> list[Issuing]:
    """The groups of this process that are still there."""
    return list(_live)


class NewGroup:
    """What a rank is told of a group that is to be made. ``rank`` of ``size``: its own; ``members``: the global ranks,
    none of the default group; ``processes``: if the caller knows more of them than the ranks will tell; ``devices``:
    the types of device whose tensors the group takes, None for all; ``strangers``: the ranks share no default group,
    whether or not each has one of its own, and may be of several jobs. They know each other by what they say in the
    store, and have no ``members``. ``roster``: of ranks that a program has named by their handles; ``store`` is then
    theirs alone. ``first``: its streams on GPUs come before others."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        members: list[int] | None = None,
        processes: Processes | None = None,
        devices: list[str] | None = None,
        strangers: bool = False,
        roster: Roster | None = None,
        first: bool = False,
    ) -> None:
        self.store, self.rank, self.size, self.timeout, self.name = store, rank, size, timeout, name
        self.members, self.processes, self.devices, self.strangers = members, processes, devices, strangers
        self.roster, self.first = roster, first


class _Extension:
    """Seconds that calls get on top of their time-out until the first one issued after it is over."""

    __slots__ = ("seconds", "taken")

    def __init__(self, seconds: float) -> None:
        self.seconds, self.taken = seconds, False


@opaque_to_dynamo
class Issuing:
    """The state of one group on one rank, and what all its operations have in common."""

    _registers_works = False  # torch's own group, or dispatcher, does

    def _set_up(self, transport: ByDevice, store: Store, new: NewGroup) -> None:
        self._transport = transport
        transport.first = new.first
        self._store, self._given_store = store, new.store  # the former is over the latter (least_store.py)
        self._group_rank, self._group_size = new.rank, new.size
        self.set_timeout(new.timeout)
        self._name, self._desc = new.name, ""
        self._lower = Lowering(new.rank, new.size)
        self._completer = Completer(transport, new.name)
        self._coalescing: list[Work] | None = None
        self._extensions: list[_Extension] = []
        self._detour = False  # whether calls must not go the fast path: while coalescing, or with an extension
        self._monitored_barriers: Any = None  # of monitored_barrier.py, once there is one
        self._splits = 0
        self._call_stacks = stacks.get(id(transport))  # which is to be told of each call, if any is
        self._closed = False
        self._buckets: Buckets | None = None  # ddp_buckets.py's
        # Of window.py: how many there have been, and what is registered, by the window's number. Peers may write to it
        # until all deregister, whatever becomes of the window and the tensor here.
        self._windows_made = 0
        self._in_windows: dict[int, Any] = {}
        _live.add(self)

    # --- settings

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    @property
    def cpu_transport(self) -> Transport:
        """The transport of its CPU tensors."""
        return self._transport.cpu

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._seconds = seconds_of(timeout)
        self._nanoseconds = int(self._seconds * 1e9)

    _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        self._extensions.append(_Extension(seconds_of(timeout)))
        self._detour = True

    def _get_sequence_number_for_group(self) -> int:
        return self._transport.next_sequence() - 1

    def _wait_for_pending_works(self) -> None:
        self._completer.wait_all(self._seconds)

    def connect(self, device: torch.device, name: str = "init_process_group(device_id=...)") -> None:
        """Makes the group ready for collectives of tensors there. Collective over its ranks."""
        if device.type != "cpu":
            call = self._lower.nothing(device, self._seconds, name)
            self._lowered(self._transport.issue, call)
            self._run([call])

    def registered(self, device: torch.device, nbytes: int) -> torch.Tensor | None:
        """So many bytes on a GPU, which fused kernels of this group read where they lie; None where there are none.
        Collective over its ranks."""
        self.connect(device, "empty")
        return self._transport.registered(device, nbytes, self._seconds)

    def _split(
        self, ranks: list[int], store: Store, timeout: timedelta | None, name: str | None, devices: list[str] | None
    ) -> NewGroup | None:
        """What makes a group of ``ranks`` of this one, in that order; None on the other ranks. Every rank of this group
        calls it, with disjoint lists."""
        self._splits += 1
        if self._group_rank not in ranks:
            return None
        strangers, ours = self._transport.strangers, "_".join(map(str, ranks))
        members = None if strangers else [self._transport.members[r] for r in ranks]
        return NewGroup(
            PrefixStore(f"split/{self._splits}/{ours}", store),
            ranks.index(self._group_rank),
            len(ranks),
            timeout or self._timeout,
            name or f"{self._name}:split:{self._splits}:{ours}",
            members,
            devices=devices,
            strangers=strangers,
        )

    # --- windows

    @property
    def supports_window(self) -> bool:
        devices = self._transport.device_types
        return devices is None or "cpu" in devices

    def new_window(self, tensor: torch.Tensor | None = None) -> Window:
        """A one-sided window, with ``tensor`` registered if there is one (window.py). Collective, in the same order on
        all ranks."""
        if not self.supports_window:
            raise UsageError(f"new_window: windows are of CPU tensors, and group {self._name} was not made for those")
        from .window import new_window  # when wanted: an import takes its time at a rank's start

        return new_window(self, tensor)

    # --- coalescing: operations go out as they come; the end gives one Work for all

    def _start_coalescing(self, device: object = None) -> None:
        self._coalescing = []
        self._detour = True

    def _end_coalescing(self, device: object = None) -> Work:
        works, self._coalescing = self._coalescing or [], None
        self._detour = bool(self._extensions)
        return self._together(works)

    # --- the end

    def abort(self) -> None:
        self._transport.abort()

    def ends_first(self) -> bool:
        """Whether it rests on what ends at exit: MPI, or what is loaded for CUDA."""
        return not isinstance(self.cpu_transport, LocalTransport) or bool(self._transport.devices())

    def shutdown(self, why: str = "") -> None:
        """``why``: a sentence for the errors of calls from then on."""
        if self._closed:
            return
        if why:
            self.cpu_transport.ended = why
        if self._transport.interrupted_here() or on_top_of_own_step():
            # A signal handler, on top of a call of a group: that call must end before the group can. It fails now; what
            # is left is closed with the group object, at the latest at exit, or when asked again.
            self._transport.abort()
            return
        self._closed = True
        forget(id(self._transport))
        self._transport.leave()
        self._completer.close()
        self._transport.close()
        self._completer.drop_all()

    # --- issuing

    def _by_torch(self, *tensors: Any) -> bool:
        """Whether a call on these arguments, which the fast path has not taken, is to go through torch's dispatcher:
        `_dispatched`. Of a whole group: backend.py."""
        return False

    def _unlike_memory(self, *tensors: Any) -> bool:
        """The same, whether or not a profiler runs."""
        return False

    def _dispatched(self, name: str, *arguments: Any) -> Any:
        raise NotImplementedError

    def _fast(self, path: FastPath, opts: Any, source: Any = None, target: Any = None) -> Any:
        """Tries the fast path (operations.py's table) with a collective's arguments as c10d passes them. Returns what
        the operation is to: the Work of an asynchronous one, None of one that is done (as NCCL's: c10d asks for no Work
        of a synchronous call, and making one takes time). Else an int: SLOW_PATH: nothing was begun; or how it failed,
        which `_collective` is to raise."""
        if self._call_stacks is not None:
            self._call_stacks.note(self._transport.next_sequence())
        op, options, rooted, reduces = path
        transport = self._transport  # held: another thread's reconfigure must not free what the call is in
        fast = transport.fast_collective
        if type(opts) is not options or fast is None or self._detour or profiler_enabled():
            return SLOW_PATH
        given = opts.timeout
        ns = self._nanoseconds if given.days < 0 or not given else int(seconds_of(given) * 1e9)
        root, redop = opts.rootRank if rooted else -1, opts.reduceOp if reduces else None
        if opts.asyncOp:
            return self._fast_submit(op, source, target, root, redop, ns)
        return fast(op, source, target, root, redop, ns) or None

    def _fast_submit(self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int) -> Work | int:
        submit = self._transport.fast_submit
        if submit is None or works_are_graph_inputs():
            return SLOW_PATH
        tensors, ticket = own_tensors(target), None
        sources = None if source is target else own_tensors(source)
        if op is Op.all_reduce and amid_backward_pass():
            from .ddp_buckets import about_to_be_reduced  # when wanted: an import takes its time at a rank's start

            sources = about_to_be_reduced(self, tensors[0])
        try:
            ticket = submit(op, source, target, root, redop, nanoseconds)
            if ticket is None:
                return SLOW_PATH
            work = Work(self._completer, (ticket,), tensors, None, sources)
            self._completer.adopt(work, eager=False)
            return work
        except BaseException:
            if ticket is not None:  # a signal handler has raised: the caller never sees the Work
                ticket.withdraw()
            raise

    def _options(self, opts: Any, timeout: timedelta | None) -> tuple[bool, float]:
        """(asynchronous, seconds). Without options: asynchronous, as the C++ overloads are."""
        given = opts.timeout if opts is not None else timeout
        seconds = self._seconds if given is None else seconds_of(given)
        return opts is None or opts.asyncOp, (seconds if seconds > 0 else self._seconds) + self._extra()

    def _extra(self) -> float:
        return sum(e.seconds for e in self._extensions) if self._extensions else 0.0

    def _take_extensions(self) -> list[_Extension]:
        """Those of which the operation now issued is the first; it gives them to `_drop` when it is over."""
        taken = [e for e in self._extensions if not e.taken]
        for e in taken:
            e.taken = True
        return taken

    def _drop(self, extensions: Sequence[_Extension] | None) -> None:
        if extensions:
            self._extensions = [e for e in self._extensions if e not in extensions]
            self._detour = self._coalescing is not None or bool(self._extensions)

    def _lowered(self, lower: Callable[..., Any], *arguments: Any) -> Any:
        """What a call is made of. Whatever is in the way of it, its arguments or want of memory, ranks are told."""
        try:
            return lower(*arguments)
        except Exception:
            self._tell_refused()
            raise

    def _tell_refused(self) -> None:
        """The ranks whose arguments were fine must not wait for this one. A group that is of no more use has told them:
        what is wrong with this call is still what its caller should hear."""
        with contextlib.suppress(Exception):
            self._transport.run(self._lower.rejected(self._seconds))

    def _collective(
        self,
        name: str,
        opts: Any,
        tensors: list[torch.Tensor],
        lower: Callable[..., Any],
        argument_lists: Sequence[Sequence[Any]],
        inputs: Sequence[torch.Tensor] | None = None,
        timeout: timedelta | None = None,
        tried: int = SLOW_PATH,
        always_counts: bool = True,
    ) -> Work | DoneWork:
        """``tensors``: the outputs; ``inputs``: for a profiler, None where they are the outputs;
        ``tried``: what `_fast` has returned; ``always_counts``: whether autograd is told that the outputs have changed
        though the operation is none of COUNTED, as torch's own groups do of coalesced ones."""
        if self._call_stacks is not None and tried == SLOW_PATH:
            self._call_stacks.note(self._transport.next_sequence())
        asynchronous, seconds = self._options(opts, timeout)
        with recorded(name, tensors if inputs is None else inputs) as record:
            # All are checked before any is issued.
            calls = [self._lowered(lower, *arguments, seconds) for arguments in argument_lists]
            if tried != SLOW_PATH:
                raise self._transport.last_error(calls[0])
            if len(calls) > 1:
                self._lowered(check_one_device, name, calls)
                self._lowered(read_before_written, calls)
            if always_counts or calls[0].name in COUNTED:
                self._lowered(count_changes, tensors)
            for call in calls:
                if call.device is not None:
                    self._lowered(self._transport.issue, call)
            if not asynchronous and self._coalescing is None:
                self._run(calls)
                return DoneWork(tensors, calls[-1].stream_op if calls else None)
            return self._submit(calls, tensors, record)

    def _submit(self, calls: Sequence[Call], tensors: list[torch.Tensor], record: Any) -> Work:
        tickets = []
        try:
            for call in calls:
                tickets.append(self._transport.submit(call))
            return self._adopt(tickets, tensors, calls, record)
        except BaseException:
            for ticket in tickets:  # the caller never sees the Work
                ticket.withdraw()
            raise

    def _run(self, calls: Sequence[Call]) -> None:
        extensions = self._take_extensions() if self._extensions else None
        try:
            for call in calls:
                self._transport.run(call)
                put_back(call)
        finally:
            self._drop(extensions)

    def _sparse_all_reduce(self, tensor: torch.Tensor, op: Any, opts: Any, timeout: timedelta | None) -> DoneWork:
        """Asynchronous ones are over, too, when this returns: all ranks must be here before any knows how much there
        is to move, and the rest takes less time than handing it to another thread does."""
        from ..lowering.sparse import SparseSum  # when wanted: an import takes its time at a rank's start

        seconds = self._options(opts, timeout)[1]
        with recorded("all_reduce", []):
            total = self._lowered(SparseSum, self._lower, tensor, op, seconds)
            self._transport.run(total.facts)
            number = self._transport.next_sequence() - 1
            where = f"all_reduce #{number} of group {self._name}, rank {self._group_rank}"
            total.require_one_shape(where, self._transport.members)
            calls = self._lowered(total.payload)
            for call in calls:
                if call.device is not None:  # what comes of them is added up on the current stream
                    self._lowered(self._transport.issue, call)
            self._run(calls)
            total.finish()
        return DoneWork([tensor], calls[-1].stream_op)

    def _message(
        self, name: str, tensors: Sequence[torch.Tensor], peer: int, tag: int, is_recv: bool
    ) -> Work | DoneMessage:
        ticket: Ticket | None = None
        posted: list[Any] = []
        call: tuple[Any, ...] = ()
        awaited = posted_to_be_awaited()
        transport = self._transport  # held, as in `_fast`
        if self._call_stacks is not None:
            self._call_stacks.note(0)
        try:
            fast = transport.fast_message
            if fast is not None and not self._detour and not profiler_enabled():
                if not fast(tensors, is_recv, peer, tag, self._nanoseconds, _PATIENCE if awaited else 0, posted):
                    return _AWAITED if awaited else DoneMessage(list(tensors), peer if is_recv else -1)
                if posted:
                    call = self._lower.message, name, *tensors, peer, tag, self._seconds, is_recv
                    ticket = transport.posted_message(posted, call)
                    work = Work(self._completer, [ticket], list(tensors), None, None)  # its tensors are all it needs
                    self._completer.keep(work)
            if not ticket:
                if self._by_torch(tensors):
                    method, to = (name, (peer, tag)) if peer >= 0 else ("recv_anysource", (tag,))
                    return self._dispatched(method, tensors, *to)
                tensor = self._lowered(only, tensors, name)
                with recorded(name if peer >= 0 else "recvAnySource", [tensor]) as record:
                    message = self._lower.message(name, tensor, peer, tag, self._seconds + self._extra(), is_recv)
                    if message.device is not None:
                        self._transport.issue(message)
                    ticket = self._transport.post(message)
                    work = self._adopt([ticket], [tensor], [message], record)
            if awaited:
                work.end()
            return work
        except BaseException:
            # A signal handler has raised: the caller never sees the Work, nor perhaps we the ticket.
            if posted and posted[0]:
                ticket = transport.posted_message(posted, call)
            if ticket:
                ticket.withdraw()
            raise

    def _adopt(
        self, tickets: list[Ticket], tensors: list[torch.Tensor], calls: Sequence[Call | Message], record: Any = None
    ) -> Work:
        """A Work for ``tickets``, which carry out ``calls``."""
        stream_ops = [c.stream_op for c in calls if c.stream_op is not None]
        copies = [c for c in calls if c.copy_back and c.device is None]
        extensions = self._take_extensions() if self._extensions else None

        def finish(went_well: bool) -> None:
            try:
                if went_well:
                    for call in copies:
                        put_back(call)
            finally:
                if record is not None:
                    record.end()
                self._drop(extensions)

        ends = bool(copies) or record is not None or bool(extensions)
        if record is not None:
            record.goes_on()
        work = self._work(tickets, tensors, finish if ends else None, calls, stream_ops, eager=ends)
        if works_are_graph_inputs():
            work.become_graph_inputs(self._registers_works)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _together(self, works: Sequence[Work]) -> Work:
        tickets = [t for w in works for t in w._tickets]
        tensors = [t for w in works for t in w._tensors]

        def finish(went_well: bool) -> None:
            for w in works:
                w.settle()

        stream_ops = [f for w in works for f in w.stream_ops]
        return self._work(tickets, tensors, finish, works, stream_ops, eager=False)

    def _work(
        self, tickets: list[Ticket], tensors: Any, finish: Any, keep: object, stream_ops: list[Any], eager: bool
    ) -> Work:
        work = (DeviceWork if stream_ops else Work)(self._completer, tickets, tensors, finish, keep)
        work.stream_ops = stream_ops
        self._completer.adopt(work, eager)
        return work


_ENDS = "the interpreter is ending, and the group has been closed"

_exits_of = 0  # the process that has registered `_close_all`: a forked child's own groups are not its parent's


def close_groups_last() -> None:
    """Has all groups of this process closed when its interpreter ends."""
    global _exits_of
    if _exits_of != os.getpid():
        _exits_of = os.getpid()
        util.Finalize(None, _close_all, exitpriority=0)


def close_groups_first() -> None:
    """Has the groups that need it closed before whatever has been registered until now; called again when more has
    been."""
    atexit.unregister(_close_some)
    atexit.register(_close_some)


def _close_some() -> None:
    _close(Issuing.ends_first)


def _close_all() -> None:
    _close(lambda group: True)


def _close(wanted: Callable[[Issuing], bool]) -> None:
    impatient = False
    try:
        if threading.current_thread() is threading.main_thread():
            impatient = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            # Another Ctrl-C ends the process here: raised in an exit handler, it would leave groups unclosed
            # and print a traceback of ours.
            if impatient:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    # A thread inside native code while the interpreter goes away would take the process with it.
    for group in live():
        if wanted(group):
            group.shutdown(_ENDS)
    if impatient:
        signal.signal(signal.SIGINT, signal.default_int_handler)
