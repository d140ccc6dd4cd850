"""A transport between the ranks of one host, through shared memory: what it asks of the core, and its tickets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_uint64, c_void_p
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ... import native
from ...call import ANY_COUNT, Agreement, Call, Memory, Op
from ...dtypes import PREMUL_SUM
from ...errors import AbortedError
from ...native import CallArgs, Failure, MessageArgs, PeerState, Span, direct, lib
from ...native.direct import CoreTicket
from ...threads import threading
from .. import SHRINKS, LocalTransport, Ticket, is_out_of_reach, plain_error, rank_name
from .segment import geometry, open_segment

if TYPE_CHECKING:
    from ...call import Buffer, Message
    from ...config import Config
    from ...creation.local_datagrams import Letters, Neighbours
    from ...native.direct import FastCollective
    from ..call_log import Peer, Record


_LONG, _FOREVER = 1e9, 2**63 - 1  # s, ns
_ENDS = 0.1  # s: how long to wait at a time for what an abort ends


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9) if seconds < _LONG else _FOREVER


class ShmTicket(CoreTicket, Ticket):
    """Takes over the native ticket whose address is ``at[0]``. ``transport``: the ShmTransport that it is of."""

    _failure: Failure | None = None
    _taken_back = False

    def __init__(self, transport: Any, at: Any, call: Any) -> None:
        self._transport, self._call = transport, call
        self.hold(transport._handle, at)

    def wait(self, seconds: float, may_run: bool = False) -> bool:
        done = self.settle(nanoseconds(seconds), may_run)
        if may_run and self._transport.raised is not None and self._transport.has_raised():
            raise self._transport._interruption()
        return done

    def error(self) -> BaseException | None:
        if not self.done() or self.status == native.OK:
            return None
        if self._failure is None:
            self._failure = Failure()
            lib.c10d_wait(self._transport._handle, self.address, 0, False, byref(self._failure))
            if self._taken_back and self._failure.status == native.ABORTED:
                self._failure.status = native.INTERRUPTED
        return self._transport.error(self._failure, self._said())

    def want(self) -> None:
        if not self.collective:
            self.settle(0, False)

    def withdraw(self) -> None:
        transport = self._transport
        if self.collective:
            transport.interrupt()  # then the thread that runs it, or was to, ends it
            while not self.wait(_ENDS, may_run=True):
                pass
        else:
            self._taken_back = lib.c10d_withdraw(transport._handle, self.address) == native.OK

    @property
    def collective(self) -> bool:
        return isinstance(self._call, Call)

    def standing(self) -> tuple[str, str]:
        number = lib.c10d_ticket_number(self.address)
        failure = Failure(status=native.TIMEOUT, peer=-1, by=-1, call=number, seq=number)
        try:
            from .error_text import ShmErrorText  # when it is wanted

            return ShmErrorText(self._transport, failure, self._said(), self._transport.states(number)).standing()
        except Exception as problem:
            if not is_out_of_reach(problem):
                raise
            return f"{self._said().name} #{number}", ""

    def _said(self) -> Call | Message:
        return self._call

    def watch(self, token: int) -> bool:
        return lib.c10d_watch(self._transport._handle, self.address, token) == native.PENDING

    @property
    def source(self) -> int:
        return lib.c10d_ticket_source(self.address)


class CollectiveTicket(ShmTicket):
    """Of a collective that went the fast path: what errors say of it is made when there is one."""

    collective = True

    def _said(self) -> Any:
        return Named(*self._call)


class Named:
    """What errors say of a collective. ``single``: it has one tensor where others have a list."""

    __slots__ = ("_op", "_single")
    _SINGLE: ClassVar = {
        Op.all_gather: "all_gather_into_tensor",
        Op.reduce_scatter: "reduce_scatter_tensor",
        Op.all_to_all: "all_to_all_single",
    }

    def __init__(self, op: int, single: bool) -> None:
        self._op, self._single = op, single

    @property
    def name(self) -> str:
        op = Op(self._op)
        return self._SINGLE.get(op, op.name) if self._single else op.name


class MessageTicket(ShmTicket):
    """Of a message that went the fast path: what errors say of it is made when there is one."""

    def _said(self) -> Message:
        make, *arguments = self._call
        return make(*arguments)


def _device_of(call: Call, memory: Memory) -> int:
    """CallArgs::device of backend/shm/api.h."""
    return memory + len(Memory) * call.ordinal if memory else 0


class ShmTransport(LocalTransport):
    """Opening it is collective over the ranks of ``letters``. ``members``: the global rank of each
    group rank. ``who``: names a rank in error messages. ``call_slot_bytes``: of a slot for calls, which others use."""

    _at: Any = None  # an array of one c10d_handle*, which the core fills: no signal handler's exception loses it
    _handle: int  # the same
    _fast: FastCollective | None = None
    _runs_ahead = False  # whether it has announced calls without waiting for the other ranks
    neighbours: Neighbours | None = None  # of the default group: by which its ranks make others

    def __init__(
        self,
        letters: Letters,
        config: Config,
        group_name: str,
        members: list[int],
        who: Callable[[int], str] | None = None,
        call_slot_bytes: int = 0,
    ) -> None:
        self.rank, self.size, self.name, self.members = letters.rank, letters.size, group_name, members
        self.who = who or functools.partial(rank_name, members)
        self.raised: BaseException | None = None  # by a signal handler, in the main thread, and to leave a call of it
        signals = self._signals()
        next(signals)
        self._poll = native.Interrupted(signals.__next__)
        self._at = (c_void_p * 1)()
        open_segment(letters, config, self._poll, call_slot_bytes, self._at)
        self._handle = self._at[0]
        self._arena_bytes = geometry(config, self.size, call_slot_bytes).arena_bytes
        lib.c10d_keep_trace(self._handle, config.trace)
        lib.c10d_set_threads(self._handle, config.threads)
        self._fast = direct.collective(
            lib.c10d_fast_collective, self._handle, self.rank, self.size, lib.c10d_fast_submit
        )
        if self._fast is not None:
            self.fast_collective = self._fast.run
        self.fast_message = direct.message(self._handle, self.size)

    # --- collectives

    def run(self, call: Call) -> None:
        if lib.c10d_run(self._handle, byref(self._args(call))):
            raise self.last_error(call)

    def under_way(self) -> str:
        own = self.peers()[self.rank].calling
        return own if own != "-" else "a collective"

    def last_error(self, call: Call | Message) -> BaseException:
        failure = Failure()
        lib.c10d_last_failure(byref(failure))
        return self.error(failure, call)

    def attempt(self, args: Any) -> Failure | None:
        if lib.c10d_run(self._handle, args):
            failure = Failure()
            lib.c10d_last_failure(byref(failure))
            if failure.status == native.INTERRUPTED:
                raise self._interruption()
            return failure
        return None

    def agree(self, call: Call, seconds: float) -> Agreement:
        args = self._args(call)
        args.device, args.timeout_ns = _device_of(call, Memory.device), nanoseconds(seconds)
        if lib.c10d_run(self._handle, byref(args)):
            raise self.last_error(call)
        number = self.next_sequence() - 1
        if call.redop == PREMUL_SUM and call.inputs:
            if (states := self.states(number)) is None:
                raise self._closed()
            factors = [s.fingerprint.factor for s in states]
        else:
            factors = None
        return Agreement(number, factors, self._sizes(number) if call.count == ANY_COUNT else None)

    def announce(self, call: Call, seconds: float) -> int:
        args = self._args(call)
        args.device, args.timeout_ns = _device_of(call, Memory.device_ahead), nanoseconds(seconds)
        self._runs_ahead = True
        if lib.c10d_run(self._handle, byref(args)):
            raise self.last_error(call)
        return self.next_sequence() - 1

    def verdict(self, name: str, number: int, seconds: float) -> BaseException | None:
        if (failure := self.health(native.NEVER)) is None:
            return None
        failure.call, failure.elapsed_ns = number, nanoseconds(seconds)
        return self.error(failure, cast("Call", SimpleNamespace(name=name)))

    def _sizes(self, number: int) -> list[tuple[list[int], list[int]]]:
        n, out = self.size, list[tuple[list[int], list[int]]]()
        for rank in range(n):
            sizes = (c_uint64 * (2 * n))()
            if lib.c10d_peer_sizes(self._handle, rank, number, sizes):
                raise self._closed()
            out.append((sizes[:n], sizes[n:]))
        return out

    def _closed(self) -> AbortedError:
        return AbortedError(f"group {self.name or '(unnamed)'}: closed during a call")

    def meet(self, call: Call, number: int, seconds: float) -> None:
        args = CallArgs(Op.barrier, 0, 0, -1, 0, 1, 0, 0.0, number, number, nanoseconds(seconds), 0, 0, None, None)
        if failure := self.attempt(byref(args)):
            raise self.error(failure, call)

    def submit(self, call: Call) -> ShmTicket:
        at = (c_void_p * 1)()
        try:
            lib.c10d_submit(self._handle, byref(self._args(call)), at)
            return self._ticket(at, call)
        except BaseException:
            self._end_unseen(at, call)
            raise

    def fast_submit(
        self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int
    ) -> ShmTicket | None:
        if self._fast is None:
            return None
        at: list[int] = []
        call = op, type(source if target is None else target) is not list
        try:
            status = self._fast.submit(op, source, target, root, redop, nanoseconds, at)
            return None if status else CollectiveTicket(self, at, call)
        except BaseException:
            self._end_unseen(at, call, CollectiveTicket)
            raise

    def _end_unseen(self, at: Any, call: Any, kind: type[ShmTicket] | None = None) -> None:
        """A signal handler has raised before anybody got to see the ticket at ``at``."""
        if at and at[0]:
            (kind or ShmTicket)(self, at, call).withdraw()

    def _args(self, call: Call) -> CallArgs:
        def spans(tensors: Sequence[Buffer]) -> Any:
            each: list[Any] = [(t.data_ptr(), t.nbytes) for t in tensors]
            return (Span * len(tensors))(*each)

        return CallArgs(
            call.op,
            call.redop,
            call.dtype.code,
            call.root,
            call.count,
            call.dtype.item_bytes,
            _device_of(call, call.memory),
            call.factor,
            0,
            0,
            nanoseconds(call.timeout),
            len(call.inputs),
            len(call.outputs),
            spans(call.inputs),
            spans(call.outputs),
        )

    def _ticket(self, at: Any, call: Call | Message) -> ShmTicket:
        if not at[0]:
            raise self.last_error(call)
        return ShmTicket(self, at, call)

    # --- memory

    def has_arena(self) -> bool:
        return self._arena_bytes > 0

    def take(self, bytes: int) -> Any:
        from .arena import take  # when wanted: an import takes its time at a rank's start

        taken = take(self._handle, bytes, self.name or "(unnamed)", self._interruption)
        if taken is None:
            self._arena_bytes = 0
        return taken

    # --- messages

    def posted_message(self, posted: list[Any], call: tuple[Any, ...]) -> MessageTicket:
        return MessageTicket(self, posted, call)

    def post(self, message: Message) -> ShmTicket:
        t = message.tensor
        args = MessageArgs(
            message.is_recv,
            message.dtype.code,
            message.peer,
            0,
            message.tag,
            Span(t.data_ptr(), t.nbytes),
            nanoseconds(message.timeout),
        )
        at = (c_void_p * 1)()
        try:
            lib.c10d_post(self._handle, byref(args), at)
            return self._ticket(at, message)
        except BaseException:
            self._end_unseen(at, message)
            raise

    # --- life

    def next_completed(self, seconds: float) -> int | None:
        token = c_uint64()
        status = lib.c10d_next_completed(self._handle, nanoseconds(seconds), byref(token))
        if status not in (native.OK, native.PENDING):
            raise AbortedError("the group is closed")
        return token.value if status == native.OK else None

    def complete(self, token: int) -> None:
        lib.c10d_complete(self._handle, token)

    def broken(self) -> bool:
        failure = Failure()
        if lib.c10d_health(self._handle, native.NEVER, byref(failure)) == native.PEER_LOST:
            lib.c10d_poison(self._handle, native.PEER_LOST, failure.peer, self.rank, self.next_sequence())
        elif failure.status == native.OK and self._runs_ahead:  # and so may not wait for one that will not come
            states = self.states(0) or []
            for rank, state in enumerate(states):
                if state.state == native.LEFT and state.arrived < states[self.rank].arrived:
                    lib.c10d_poison(self._handle, native.PEER_LOST, rank, self.rank, states[self.rank].arrived)
                    return True
        return failure.status != native.OK

    # --- for a transport over several hosts, of which this is the part inside one

    @property
    def handle(self) -> int:
        return self._handle

    def health(self, number: int) -> Failure | None:
        failure = Failure()
        return failure if lib.c10d_health(self._handle, number, byref(failure)) else None

    def end_for_all(self, status: int, peer: int, by: int, number: int) -> None:
        lib.c10d_poison(self._handle, status, peer, by, number)

    def probe(self, tag: int) -> int:
        return lib.c10d_probe(self._handle, tag)

    def set_mark(self, mark: int) -> None:
        lib.c10d_set_mark(self._handle, mark)

    def unmarked(self, mark: int) -> list[int]:
        states = self.states(0)
        return [r for r, s in enumerate(states or []) if r != self.rank and s.alive and s.mark != mark]

    def gone(self) -> dict[int, str]:
        return {
            rank: f"(pid {state.pid}) has died, or left the group"
            for rank, state in enumerate(self.states(0) or [])
            if not state.alive
        }

    def shrinking(self) -> list[int]:
        return [rank for rank, state in enumerate(self.states(0) or []) if state.mark & SHRINKS]

    def enter_monitored_barrier(self, number: int) -> None:
        lib.c10d_enter_monitored_barrier(self._handle, number)

    def in_a_collective_instead(self, number: int) -> tuple[bool, list[int]]:
        sequence = self.next_sequence()
        for rank, state in enumerate(self.states(sequence) or []):
            if rank == self.rank or state.arrived < sequence:
                continue
            called = state.fingerprint
            tells_us = called.seq == sequence and called.op == Op.monitored_barrier
            if tells_us or self.monitored_barriers(rank) < number:
                return True, []
        return False, []

    def monitored_barriers(self, rank: int) -> int:
        return int(lib.c10d_monitored_barriers(self._handle, rank))

    def next_sequence(self) -> int:
        return lib.c10d_next_seq(self._handle)

    def abort(self) -> None:
        lib.c10d_abort(self._handle)

    def interrupt(self) -> None:
        lib.c10d_poison(self._handle, native.INTERRUPTED, self.rank, self.rank, 0)
        lib.c10d_abort(self._handle)

    def leave(self) -> None:
        lib.c10d_leave(self._handle)

    def close(self) -> None:
        neighbours, self.neighbours = self.neighbours, None
        if neighbours is not None:
            neighbours.close()
        lib.c10d_close(self._handle)

    def __del__(self) -> None:
        if self._fast is not None:
            self._fast.close()
        if self._at is not None and self._at[0]:
            lib.c10d_free(self._at[0])

    def _signals(self) -> Iterator[int]:
        # The core asks this generator's next value every so often while the main thread sleeps in it:
        # running Python code is what lets Python's signal handlers run, Ctrl-C's among them. A
        # generator, because they run wherever a frame is entered: here, that is inside the try.
        answer = 0
        while True:
            try:
                yield answer
                answer = 0
            except GeneratorExit:
                return
            except BaseException as error:
                self.raised, answer = error, 1

    def _interruption(self) -> BaseException:
        raised, self.raised = self.raised, None
        return raised or KeyboardInterrupt()

    def has_raised(self) -> bool:
        """Whether a signal handler has raised in this thread while it carried out a call, perhaps another than the one
        it was to wait for: what it raised is to leave the wait."""
        return self.raised is not None and threading.current_thread() is threading.main_thread()

    def interrupted_here(self) -> bool:
        return bool(native.inside(self._handle))

    # --- errors

    def states(self, sequence: int) -> list[PeerState] | None:
        out = [PeerState() for _ in range(self.size)]
        for rank, state in enumerate(out):
            if lib.c10d_peer_state(self._handle, rank, sequence, byref(state)):
                return None
        return out

    def trace(self) -> list[Record]:
        from ..call_log import native_records  # when it is wanted: it takes its time, and few groups need it

        return native_records(self._handle)

    def peers(self) -> list[Peer]:
        from ..call_log import native_peers

        return native_peers(self._handle, self.size)

    def error(self, failure: Failure, call: Call | Message) -> BaseException:
        """The exception for a native Failure of ``call`` (a Call or a Message)."""
        if self.has_raised():  # else it has left the wait for this call already
            return self._interruption()
        if failure.status == native.REENTERED:
            return self.inside(call.name)
        try:
            from .error_text import ShmErrorText

            return ShmErrorText(self, failure, call, self.states(failure.seq)).exception()
        except Exception as problem:
            if not is_out_of_reach(problem):
                raise
            return plain_error(self, failure, call, problem)
