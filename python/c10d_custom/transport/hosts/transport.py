"""A group over several hosts: shared memory inside each, MPI between.

Collectives of groups of a few ranks with little to move go directly between all ranks (flat_exchange.py), the
others host by host (two_level.py); messages go by shared memory or by MPI (messages.py), whichever leads
to the peer. Bad news travels by itself (failure_detector.py).
"""

import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from threading import get_ident

from torch.distributed import PrefixStore

from ... import native
from ...call import Agreement, Call, Fingerprint, Memory, Op, mismatch_table
from ...creation.exchange import Exchange
from ...creation.liveness import Processes
from ...errors import TransportError
from ...native import lib
from ...threads import start
from ..base import Ticket, Transport
from ..call_log import CallLog, native_peers, native_records
from ..failure import ErrorText, Trouble, rank_name
from ..tickets import Queue
from ..trace_file import Peer
from .failure_detector import FailureDetector, Fault
from .flat_exchange import MOST_RANKS, FlatExchange, fingerprint, parse
from .layout import Hosts
from .leader_all_reduce import SLICE_NS, Board, LeaderAllReduce, LeaderFastPath, slot_bytes
from .link import MpiLink
from .messages import Messages
from .mpi_calls import MpiCalls, Progress
from .pipelined_reduce import PipelinedReduce
from .two_level import TwoLevelCollective

# Ranks of other hosts, in a local group's poison record.
_REMOTE = 1 << 20
# How long what a rank sent before it left may still be on its way.
_GRACE = 1.0
_REASON = 0.3  # s: for the news of why a neighbour left
# Bytes a host may send for one flat exchange.
_FLAT_BYTES = 128 << 10
_FLAT_MOST, _SMALL_MOST = 16 << 10, 64 << 10


class _LocalTicket(Ticket):
    """Of a message inside the host."""

    def __init__(self, ticket, here):
        self._inner, self._here = ticket, here

    def done(self):
        return self._inner.done()

    def wait(self, seconds, may_run=False):
        return self._inner.wait(seconds, may_run)

    def error(self):
        return self._inner.error()

    def watch(self, token):
        return self._inner.watch(token)

    def withdraw(self):
        self._inner.withdraw()

    @property
    def source(self):
        source = self._inner.source
        return self._here[source] if source >= 0 else -1


class HierarchicalTransport(Transport):
    """Opening it is collective over the ranks of ``exchange``. ``members``: the global rank of each group rank;
    ``locations``: the Location of each; ``open_local``: makes the transport inside this host (of ShmTransport's
    arguments); ``job``: the process's use of MPI; ``abandon``: called if MPI can no longer end in good order."""

    def __init__(self, exchange, config, group_name, members, locations, open_local, job, abandon):
        self._abandon = abandon
        self.rank, self.size, self.name, self.members = exchange.rank, exchange.size, group_name, members
        self.locations, self._store = locations, exchange.store.plain
        self.hosts = hosts = Hosts.of(locations, self.rank)
        # Shares of a chunk go to every host: they should not shrink to nothing.
        self.chunk = config.chunk_bytes * max(1, len(hosts.ranks) // 16)
        self._runner = None  # the thread that carries out a collective
        self._number = native.NEVER  # of that collective
        self._over = False
        self._sound = True  # no collective has failed here: MPI is through with all memory
        self._fast_path = LeaderFastPath(config.trace)
        self._left_at = {}
        self.local_calls = {}
        self.told = []
        self.detector = None
        with ExitStack() as cleanup:
            failure = None
            try:
                neighbours = Processes(self._who_local)
                cleanup.callback(neighbours.close)
                for index, r in enumerate(hosts.here):
                    neighbours.add(index, locations[r].pid, locations[r].started)
                inside = Exchange(
                    exchange.store.under(f"host{hosts.mine}"), hosts.local, len(hosts.here), exchange.left(), neighbours
                )
                widest = max(map(len, hosts.ranks))
                flat = self.size <= MOST_RANKS
                small = min(_SMALL_MOST, _FLAT_BYTES // (widest * (len(hosts.ranks) - 1))) if flat else 0
                self.local = open_local(
                    inside,
                    config,
                    group_name,
                    [members[r] for r in hosts.here],
                    self._who_local,
                    slot_bytes(small) if flat else 0,
                )
                cleanup.callback(self.local.close)
                neighbours.close()
                self.detector = FailureDetector(exchange, hosts.ranks, self._on_fault)
                cleanup.callback(self.detector.close)
            except (TransportError, OSError) as error:
                failure = f"rank {self.rank} ({locations[self.rank].hostname}): {error}"
            table = exchange.gather_and_decide("mpi", {"rank": job.rank, "error": failure}, _all_well)
            self.link = MpiLink(job, exchange, table, group_name, self._check_collective)
            cleanup.pop_all()
        calls = MpiCalls(job.MPI)
        self._progress = Progress(self.link, calls, self.local._handle)
        self.pipelined = PipelinedReduce(self.link, calls, hosts, self.chunk, self.local.attempt, self.trouble)
        self.flat = self.leader = None
        if flat:
            each = min(_FLAT_MOST, _FLAT_BYTES // max(1, widest * (self.size - widest)))
            self.flat = FlatExchange(self.link, hosts, Board(self.local._handle, hosts.local, small), each)
            self.leader = LeaderAllReduce(
                self.link, calls, hosts, self.flat, self._progress.request, small, self._fast_path.add
            )
            self._fast_path.serve(self.leader)
            if self.detector.trouble(native.NEVER) is not None:
                self._fast_path.stop()
        self._log = CallLog(config.trace)
        self.local.failed = lambda error: self.failed(error)
        self._queue = Queue(self._execute, self.complete, group_name, weakref.proxy(self), self._fast_path.sequencer)
        self._messages = Messages(
            self.link,
            self.complete,
            self._message_error,
            self.check,
            self._probe_local,
            self._post_local_from,
            self._log,
            weakref.WeakMethod(self.abort),
            weakref.WeakMethod(self.inside),
        )

    # --- the Transport's face

    def run(self, call):
        error = self._queue.run(call)
        if error is not None:
            raise error

    def fast_all_reduce(self, address, count, kind, nanoseconds):
        """As ShmTransport's. What takes less than a slice has no use for a time-out."""
        error = None
        try:
            status = native.leader_fast_path(self._fast_path.at, address, count, kind.packed, SLICE_NS)
            if not status:
                return
            if status == native.DONE_WAKE:
                self._queue.wake()
            elif status != native.SLOW_PATH:
                error = self._finish_quickly(status, address, count, kind, nanoseconds)
        except BaseException:
            if self._fast_path.runner == get_ident():  # a signal handler raised
                self._spread(Fault(native.ABORTED, self.rank, self.rank, self._fast_path.under_way[0]))
                self._fast_path_over(native.INTERRUPTED)
            raise
        if error is not None:
            raise error
        if status == native.SLOW_PATH:
            self.run(Call.fast_all_reduce(address, count, kind, nanoseconds))

    def _finish_quickly(self, status, address, count, kind, nanoseconds):
        self._number = self._fast_path.under_way[0]
        try:
            self._fast_path.go_on(status, nanoseconds * 1e-9)
            self._fast_path_over(native.OK)
            return None
        except (Trouble, TransportError, self.link.MPI.Exception) as failure:
            number, began = self._fast_path.under_way
            call = Call.fast_all_reduce(address, count, kind, nanoseconds)
            return self._error(failure, call, began, number, self._fast_path_over)

    def _fast_path_over(self, status):
        if self._fast_path.over(status):
            self._queue.wake()

    def agree(self, call, seconds):
        """As ShmTransport's, but for the factors and sizes."""
        self.run(replace(call, memory=Memory.device, timeout=seconds))
        return Agreement(self._queue.number)

    def broken(self):
        """As ShmTransport's."""
        try:
            self.check([])
        except Trouble:
            return True
        return False

    def submit(self, call):
        return self._queue.submit(call)

    def post(self, message):
        host, index = self.hosts.of_rank(message.peer) if message.peer >= 0 else (None, -1)
        if host == self.hosts.mine:
            return self._post_local(message, index)
        return self._messages.post(message)

    def next_completed(self, seconds):
        return self.local.next_completed(seconds)

    def next_sequence(self):
        return self._queue.number + 1

    def interrupted_here(self):
        return get_ident() in (self._runner, self._fast_path.runner) or self.local.interrupted_here()

    def under_way(self):
        if get_ident() not in (self._runner, self._fast_path.runner) and not self.local.interrupted_here():
            return "a message"
        number = self._number if self._fast_path.runner != get_ident() else self._fast_path.under_way[0]
        records = [r for r in self._log.records([], self._fast_path.records()) if r.number == number]
        return f"{records[-1].operation} #{number}" if records else f"collective #{number}"

    def abort(self):
        self._spread(Fault(native.ABORTED, self.rank, self.rank, 0))
        self.local.abort()

    def leave(self):
        if not self._over:
            self._tell_what_this_host_knows()
        self._over = True
        self._fast_path.stop()
        self.detector.leave()
        self._queue.close()
        self._messages.close()
        self.local.leave()

    def _tell_what_this_host_knows(self):
        """The shared memory may show what the watch has not heard: a rank that has just died, of which the others would
        see no more than this rank's end; or that a neighbour gave up, whose news of the reason is about to come."""
        failure = native.Failure()
        status = lib.c10d_health(self.local._handle, native.NEVER, failure)
        if status == native.BROKEN:
            until = time.monotonic() + _REASON
            while self.detector.trouble(native.NEVER) is None and time.monotonic() < until:
                time.sleep(1e-3)
            status = failure.cause
        if self.detector.trouble(native.NEVER) is None and status in (native.PEER_LOST, native.TIMEOUT):
            self._spread(Fault(status, self.trouble(failure).peer, self.rank, 0))

    def close(self):
        if not self._over:
            self.leave()
        self.detector.close()
        healthy = self._sound and self.detector.trouble(native.NEVER) is None
        self.local.close()
        self._progress.close()
        if healthy:
            self.pipelined.free()
        else:
            self.link.give_up([], (self.flat, self.leader, self.pipelined))
        self.link.close(healthy)

    # --- messages inside the host

    def _post_local(self, message, index):
        return _LocalTicket(self.local.post(replace(message, peer=index)), self.hosts.here)

    def _post_local_from(self, message, source):
        return self._post_local(message, self.hosts.here.index(source))

    def _probe_local(self, tag):
        source = lib.c10d_probe(self.local._handle, tag)
        return self.hosts.here[source] if source >= 0 else -1

    def complete(self, token):
        lib.c10d_complete(self.local._handle, token)

    # --- one collective

    def _execute(self, number, call):
        self._runner, self._number = get_ident(), number
        started = (
            self._log.begin(
                number,
                call.op,
                call.redop,
                call.dtype,
                call.root,
                call.count,
                sum(t.nbytes for t in call.inputs),
                sum(t.nbytes for t in call.outputs),
            )
            * 1e-9
        )
        collective = None
        try:
            self._check_quickly(number)
            if call.op is Op.all_reduce and self.leader is not None and call.memory is not Memory.device:
                self._all_reduce(number, call, started + call.timeout)
            else:
                collective = TwoLevelCollective(self, number, call, started + call.timeout)
                collective.run()
            self._log.end(native.OK)
            return None
        except (Trouble, TransportError, self.link.MPI.Exception) as failure:
            error = self._error(failure, call, started, number, self._log.end)
            if collective is not None:
                collective.withdraw()
            return error
        except BaseException:
            # A signal handler raised. The others must not wait for what will not come.
            self._log.end(native.INTERRUPTED)
            self._spread(Fault(native.ABORTED, self.rank, self.rank, number))
            if collective is not None:
                collective.withdraw()
            raise
        finally:
            self._runner = None

    def _all_reduce(self, number, call, deadline):
        if call.inputs[0].nbytes <= self.leader.limit:
            return self.leader.run(number, call, deadline)
        self.leader.announce(number, call, deadline)
        self.pipelined.reduce(number, call, deadline, 0, None)

    def _error(self, trouble, call, started, number, end):
        """The exception for a call that failed. ``end``: told the native status."""
        if not isinstance(trouble, Trouble):
            trouble = self._explain(trouble)
        end(getattr(trouble, "status", native.ABORTED))
        self._sound = False
        if isinstance(trouble, TransportError):
            self._spread(Fault(native.ABORTED, self.rank, self.rank, number))
            self.failed(trouble)
            return trouble
        if trouble.status == native.PEER_LOST:
            trouble = self._why_left(trouble)
        if trouble.status in (native.TIMEOUT, native.PEER_LOST, native.MISMATCH):
            self._spread(Fault(trouble.status, trouble.peer, self.rank, number))
        elif trouble.status == native.EXHAUSTED:
            self._spread(Fault(native.ABORTED, self.rank, self.rank, number))
        trouble.call = number
        trouble.seq = trouble.seq or number
        trouble.elapsed_ns = int((time.monotonic() - started) * 1e9)
        return _ErrorText(self, trouble, call).exception()

    def _why_left(self, trouble):
        """A neighbour that leaves in the middle of a call has a reason, a lost rank for one, and has told it before;
        but the shared memory may show that it left before the news is here."""
        if trouble.peer not in self.hosts.here:
            return trouble
        states = self.local.states(0)
        if states is None or states[self.hosts.here.index(trouble.peer)].state != native.LEFT:
            return trouble
        until = time.monotonic() + _REASON
        try:
            while time.monotonic() < until and trouble.peer not in self.detector.left:
                self._check_quickly()
                time.sleep(1e-3)
            self._check_quickly()
        except Trouble as reason:
            return reason
        return trouble

    def _explain(self, error):
        """The Trouble behind an error of MPI's, which may come before the news of a lost rank."""
        until = time.monotonic() + _GRACE
        while time.monotonic() < until:
            try:
                self.check([])
            except Trouble as trouble:
                return trouble
            time.sleep(5e-3)
        return error if isinstance(error, TransportError) else TransportError(f"MPI: {error}")

    def _message_error(self, trouble, message, began):
        trouble.elapsed_ns = int((time.monotonic() - began) * 1e9)
        return _ErrorText(self, trouble, message).exception()

    # --- the trace

    def trace(self):
        # Of the native group only the messages: its collectives are stages of ours.
        inside = [r for r in native_records(self.local._handle) if r.is_message]
        for record in inside:
            record.peer = self.hosts.here[record.peer] if record.peer >= 0 else -1
        return sorted(
            self._log.records(self._queue.queued(), self._fast_path.records()) + inside, key=lambda r: r.issued
        )

    def peers(self):
        # Nobody here knows how far the ranks of other hosts have come.
        inside = {self.hosts.here[p.rank]: p for p in native_peers(self.local._handle, len(self.hosts.here))}
        fault = self.detector.fault
        lost = fault.peer if fault is not None and fault.status == native.PEER_LOST else -1
        return [
            Peer(
                r,
                self.locations[r].pid,
                "gone" if r == lost else inside[r].state if r in inside else "left" if r in self.detector.left else "-",
            )
            for r in range(self.size)
        ]

    # --- who is gone

    def _check_collective(self, peers):
        self.check(peers, self._number)

    def check(self, peers, number=native.NEVER):
        """Raises Trouble if the group is of no more use, at least not for the collective ``number``, or a rank of
        ``peers`` has left it."""
        self._check_quickly(number)
        failure = native.Failure()
        if lib.c10d_health(self.local._handle, number, failure):
            raise self.trouble(failure)
        for peer in peers:
            if peer in self.detector.left:
                first = self._left_at.setdefault(peer, time.monotonic())
                if time.monotonic() - first > _GRACE:
                    raise Trouble(native.PEER_LOST, peer)

    def _check_quickly(self, number=native.NEVER):
        if self._over:
            raise Trouble(native.ABORTED)
        fault = self.detector.trouble(number)
        if fault is not None:
            if fault.status == native.ABORTED and fault.by == self.rank:
                raise Trouble(native.ABORTED)
            raise Trouble(native.BROKEN, fault.peer, fault.by, fault.status, seq=fault.number)

    def trouble(self, failure):
        """The Trouble for a native Failure of the local group."""

        def group(rank):
            return rank - _REMOTE if rank >= _REMOTE else self.hosts.here[rank] if rank >= 0 else -1

        return Trouble(failure.status, group(failure.peer), group(failure.by), failure.cause, seq=failure.seq)

    def _spread(self, fault):
        self._record(fault)
        self.detector.report(fault)

    def _on_fault(self, fault):
        self._record(fault)

    def _record(self, fault):
        self._fast_path.stop()
        # One that has left is alive, and waits for the others in MPI's Finalize.
        left = self.detector.left if self.detector is not None else ()
        if fault.status == native.TIMEOUT or fault.status == native.PEER_LOST and fault.peer not in left:
            self._abandon()
        lib.c10d_poison(self.local._handle, fault.status, self._index(fault.peer), self._index(fault.by), fault.number)

    def _index(self, rank):
        """What the local group knows it as."""
        if rank < 0:
            return -1
        return self.hosts.here.index(rank) if rank in self.hosts.here else rank + _REMOTE

    # --- names, for errors

    def who(self, rank):
        return f"{rank_name(self.members, rank)} on {self.locations[rank].hostname}"

    def _who_local(self, rank):
        return self.who(rank - _REMOTE if rank >= _REMOTE else self.hosts.here[rank])


def _all_well(said):
    errors = [s["error"] for s in said if s["error"]]
    if errors:
        raise TransportError("; ".join(dict.fromkeys(errors)))
    return [s["rank"] for s in said]


class _ErrorText(ErrorText):
    def who(self, rank):
        return self.t.who(rank)

    def fate(self, rank):
        if rank in self.t.detector.left:
            return f"{self.who(rank)} has left the group (destroy_process_group, or its process ended)"
        return f"{self.who(rank)} (pid {self.t.locations[rank].pid}) has died, or its host is gone"

    def missing(self):
        # This rank knows whom it waited for, and they may have waited for others: those who timed out
        # alike say so in the store.
        said = _published(self.t, self.f.seq, self.call, 0.3)
        late = [r for r, fingerprint in said.items() if fingerprint is None]
        if len(late) == self.t.size - 1:
            late = getattr(self.f, "missing", None) or ([self.f.peer] if self.f.peer >= 0 else [])
        return f"Missing: {', '.join(self.who(r) for r in late)}. (This is collective #{self.f.seq}.)" if late else ""

    def table(self):
        return mismatch_table(_published(self.t, self.f.seq, self.call, 1.0), self.t.members)


def _published(transport, number, call, seconds):
    """Every rank's fingerprint of a collective that failed, as far as they say so in time."""
    exchange = Exchange(PrefixStore(f"failed/{number}", transport._store), transport.rank, transport.size, seconds)
    prints = dict.fromkeys(range(transport.size))
    mine = parse(fingerprint(number, call))
    prints[transport.rank] = Fingerprint(*mine)

    def ask():
        try:
            exchange.say(str(transport.rank), mine)
            for rank in range(transport.size):
                try:
                    prints[rank] = Fingerprint(*exchange.hear(str(rank), f"rank {rank}"))
                except TransportError:
                    pass  # it has not called, or its process is gone
        except RuntimeError:
            pass  # the store is gone with the process that served it

    # In a thread: a TCPStore behind a network that is cut waits without end, whatever the time-out.
    start(ask, "c10d_custom:ask").join(seconds + 0.2)
    return dict(prints)
