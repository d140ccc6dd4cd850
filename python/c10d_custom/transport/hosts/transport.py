"""A group over several hosts: shared memory inside each, MPI between.

Which algorithm a collective takes, algorithm.py says; messages go by shared memory or by MPI (messages.py), whichever
leads to the peer. Bad news travels by itself (failure_detector.py, health.py).
"""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed import PrefixStore

from ... import dtypes, native
from ...call import Agreement, Call, Memory, Op, changed
from ...creation import Processes
from ...creation.exchange import Exchange
from ...creation.local_datagrams import Letters, letters_of
from ...errors import TransportError, UsageError
from ...native.direct import NOT_BEGUN, without_functions
from ...threads import threading
from .. import Transport, rank_name
from ..call_log import CallLog, Peer
from ..tickets import Queue
from ..trouble import Trouble
from .algorithm import Agree, Limits, Move, choose
from .balance import Balances
from .error_text import HostsErrorText, fate, heard_of, tell_what_was_refused
from .failure_detector import Fault
from .flat_exchange import CallSlots, FlatExchange, parse, slot_bytes
from .health import Health, group_rank
from .layout import Hosts
from .leader_all_reduce import SLICE_NS, LeaderAllReduce, LeaderFastPath
from .link import HEADER, ROUND, MpiLink
from .local_messages import LocalMessages
from .meeting_point import MeetingPoint
from .messages import Messages, Surroundings
from .mpi_calls import MpiCalls, Progress
from .pipelined_reduce import PipelinedReduce
from .two_level import TwoLevelCollective

if TYPE_CHECKING:
    from mpi4py.MPI import Request

    from ...call import Message
    from ...config import Config
    from ...creation.topology import Location
    from ...launch.mpi_job import Job
    from .. import LocalTransport, Ticket
    from ..call_log import Record
    from .failure_detector import FailureDetector
    from .link import Buffer
    from .local_call import LocalCall

    OpenLocal = Callable[[Letters, Config, str, list[int], Callable[[int], str], int], LocalTransport]


_REFUSED = 256  # of so many of the last collectives it is known which this rank has refused


class HostsGroup(NamedTuple):
    """What a group over hosts is made from. ``members``: the global rank of each group rank; ``locations``: the
    Location of each; ``open_local``: makes the transport inside this host (of ShmTransport's arguments); ``job``: the
    process's use of MPI; ``abandon``: as of Health; ``detector``: the group's, open; ``meets``: whether its ranks are
    to find each other after a loss, at their `meeting_point`."""

    exchange: Exchange
    config: Config
    name: str
    members: list[int]
    locations: Sequence[Location]
    open_local: OpenLocal
    job: Job
    abandon: Callable[[bool], None]
    detector: FailureDetector
    meets: bool


class HierarchicalTransport(Transport):
    """Opening it is collective over the ranks of the group."""

    # Of small calls; there where `limits` is.
    flat: FlatExchange
    leader: LeaderAllReduce
    meeting_point: MeetingPoint | None = None
    mpi_finalized = False  # by the program, which has ended the group
    disowned: UsageError | None = None  # in a forked child: what to tell windows of this group

    def __init__(self, group: HostsGroup) -> None:
        exchange, config, locations, abandon = group.exchange, group.config, group.locations, group.abandon
        self.rank, self.size, self.name, self.members = exchange.rank, exchange.size, group.name, group.members
        self.locations, self.store = locations, exchange.store.plain
        self.hosts = hosts = Hosts.of(locations, self.rank)
        self.limits = limits = Limits.of(self.size, hosts)
        # Shares of a chunk go to every host: they should not shrink to nothing.
        self.chunk = config.chunk_bytes * max(1, len(hosts.ranks) // 16)
        self.balances = Balances(self.rank, self.size)
        self._number = native.NEVER  # of the collective that has begun last
        self._sound = True  # no collective has failed here: MPI is through with all memory
        self._fast_path = LeaderFastPath(config.trace)
        self.local_calls: dict[tuple[int, int], LocalCall] = {}
        self.told: list[tuple[list[Request], Buffer]] = []
        self.published: set[int] = set()
        self.refused: dict[int, Call] = {}
        with ExitStack() as cleanup:
            failure, offer = None, None
            try:
                self.local = self._open_local(group, slot_bytes(limits.leader) if limits else 0)
                cleanup.callback(self.local.close)
                self.health = Health(self.rank, hosts, self.local, self._fast_path.stop, abandon)
                self.detector = self.health.detector = group.detector
                self.detector.tell(_listener(self))
                if group.meets:
                    self.meeting_point = MeetingPoint(self.rank, hosts)
                    cleanup.callback(self.meeting_point.close)
                    offer = self.meeting_point.offer(self.detector)
            except (TransportError, OSError) as error:
                failure = f"rank {self.rank} ({locations[self.rank].hostname}): {error}"
            said = {"rank": group.job.rank, "error": failure, "offer": offer, "chunk": self.chunk}
            table = exchange.gather_and_decide("mpi", said, all_well)
            self.store = PrefixStore(table["token"], self.store)
            if self.meeting_point is not None:
                self.meeting_point.settle(table["offers"], table["secret"])
            token = int(table["token"], 16)
            try:
                news = self.detector.failure_news
                self.link = MpiLink(group.job, exchange, table["ranks"], token, self._check_collective, news)
            except BaseException:  # of a signal handler, too: MPI is still at it
                abandon(True)
                raise
            cleanup.pop_all()
        self._open_algorithms(MpiCalls(group.job.MPI), config.spin_us * 1000)
        self._log = CallLog(config.trace)
        self.local.on_failure(self.failed)
        self._queue = Queue(self._execute, self.complete, self.name, weakref.proxy(self), self._fast_path.sequencer)
        self._local_messages = LocalMessages(self.local, hosts.here)
        around = Surroundings(
            self._message_error,
            self.health.check,
            self.health.check_quickly,
            self._local_messages.probe,
            self._local_messages.post_from,
            self._log,
            weakref.WeakMethod(self.abort),
            weakref.WeakMethod(self.inside),
        )
        self._messages = Messages(self.link, self.complete, around)

    def _open_local(self, group: HostsGroup, call_slot_bytes: int) -> LocalTransport:
        """The transport inside this host. Collective over its ranks."""
        hosts, exchange = self.hosts, group.exchange
        neighbours = Processes(self._who_local, exchange.processes.left_for)
        try:
            for index, r in enumerate(hosts.here):
                neighbours.add(index, self.locations[r].pid, self.locations[r].started)
            store = exchange.store.under(f"host{hosts.mine}")
            inside = Exchange(store, hosts.local, len(hosts.here), exchange.left(), neighbours)
            members = [self.members[r] for r in hosts.here]
            with letters_of(inside) as letters:
                return group.open_local(letters, group.config, self.name, members, self._who_local, call_slot_bytes)
        finally:
            neighbours.close()

    def _open_algorithms(self, calls: MpiCalls, awake_ns: int) -> None:
        hosts, limits = self.hosts, self.limits
        self._progress = Progress(self.link, calls, self.local.handle)
        self.pipelined = PipelinedReduce(self.link, calls, hosts, self.chunk, self.local.attempt, self.health.trouble)
        if limits is not None:
            call_slots, idle = CallSlots(self.local.handle, hosts.local, limits.leader), self._progress.request
            self.flat = FlatExchange(self.link, hosts, call_slots, limits.flat, self.balances)
            self.leader = LeaderAllReduce(self.link, calls, hosts, self.flat, idle, limits.leader, self._fast_path.add)
            self.leader.way.awake_ns = awake_ns
            self._fast_path.serve(self.leader)
            if not self.health.sound():
                self._fast_path.stop()

    # --- the Transport's face

    def run(self, call: Call) -> None:
        error = self._queue.run(call)
        if error is not None:
            raise error

    def fast_collective(self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, /) -> int:
        """As ShmTransport's, of a small all_reduce. What takes less than a slice has no use for a time-out."""
        if op != Op.all_reduce:
            return native.SLOW_PATH
        error = None
        try:
            status = self._fast_path.run(op, source, target, root, redop, SLICE_NS)
            if status == native.SLOW_PATH:
                return status
            if status == native.DONE_WAKE:
                self._queue.wake()
            elif status != native.OK:
                error = self._finish_quickly(status, source, redop, nanoseconds)
        except BaseException:
            if self._fast_path.runner == threading.get_ident():  # a signal handler raised
                self.health.abort(self._fast_path.under_way[0], native.INTERRUPTED)
                self._fast_path_over(native.INTERRUPTED)
            raise
        if error is None:
            error = self._messages.refusal(None)
        if error is not None:
            raise error
        return native.OK

    def _finish_quickly(self, status: int, tensors: Any, redop: Any, nanoseconds: int) -> BaseException | None:
        self._number = self._fast_path.under_way[0]
        try:
            self._fast_path.go_on(status, nanoseconds * 1e-9)
            self._fast_path_over(native.OK)
            return None
        except (Trouble, TransportError, self.link.MPI.Exception) as failure:
            number, began = self._fast_path.under_way
            t = tensors[0] if isinstance(tensors, list) else tensors
            dtype, code = dtypes.lookup(t.dtype), dtypes.split_op(redop)[0]
            call = Call(Op.all_reduce, "all_reduce", dtype, nanoseconds / 1e9, [t], [t], count=t.numel(), redop=code)
            return self._error(failure, call, began, number, self._fast_path_over)

    def _fast_path_over(self, status: int) -> None:
        if self._fast_path.over(status):
            self._queue.wake()

    def agree(self, call: Call, seconds: float) -> Agreement:
        """Does what ShmTransport's does, but for the factors and sizes."""
        self.run(changed(call, memory=Memory.device, timeout=seconds))
        return Agreement(self._queue.number)

    def broken(self) -> bool:
        """Whether the group is of no more use."""
        return self.health.broken()

    def gone(self) -> dict[int, str]:
        # Of this host's ranks the detector may know only the first that died, `local` all.
        detector = self.detector
        fault = detector.fault
        found = detector.ended | detector.left
        if fault is not None and fault.status == native.PEER_LOST:
            found = found | {fault.peer}
        found |= {self.hosts.here[index] for index in self.local.gone()}
        return {rank: fate(self, rank) for rank in sorted(found - {self.rank, -1})}

    def shrinking(self) -> list[int]:
        return sorted(self.detector.shrinking)

    def tell_that_it_shrinks(self) -> None:
        """This rank has called shrink_group: it takes part in the making of no other group."""
        self.detector.shrink()

    def submit(self, call: Call) -> Ticket:
        return self._queue.submit(call)

    def post(self, message: Message) -> Ticket:
        if self.disowned is not None:
            raise self.disowned
        if message.peer in self.hosts.here:
            if (error := self._messages.refusal(message)) is not None:
                raise error
            return self._local_messages.post(message)
        return self._messages.post(message)

    def fast_message(self, *message: Any) -> int:
        """Does what ShmTransport's does, for messages between ranks of one host."""
        if self._messages.refusals.any():
            return NOT_BEGUN  # `post` raises what they say
        return self._local_messages.fast(*message)

    def posted_message(self, posted: list[Any], call: tuple[Any, ...]) -> Ticket:
        return self._local_messages.posted(posted, call)

    def next_completed(self, seconds: float) -> int | None:
        return self.local.next_completed(seconds)

    def enter_monitored_barrier(self, number: int) -> None:
        self.local.enter_monitored_barrier(number)

    def in_a_collective_instead(self, number: int) -> tuple[bool, list[int]]:
        sequence = self.next_sequence()
        if not self._queue.idle():  # what has come may be of that
            return False, []
        if self.limits is None:
            here, tag = self.local.in_a_collective_instead(number)[0], ROUND
        else:
            here, tag = any(self._strays(i, sequence, number) for i in range(len(self.hosts.here))), HEADER
        # A call that was refused leaves what nobody receives until the next one.
        peers = [] if self.told else [r for h in self.hosts.others for r in self.hosts.ranks[h]]
        seen = [r for r in peers if self.link.comm.Iprobe(r, tag)]
        return (here, seen) if sequence == self.next_sequence() and self._queue.idle() else (False, [])

    def _strays(self, local: int, sequence: int, number: int) -> bool:
        """Does what `in_a_collective_instead` does, for one rank of this host."""
        call_slots = self.flat.call_slots
        if local == self.hosts.local or not call_slots.has(local, sequence):
            return False
        tells_us = parse(call_slots.header(local))[:2] == (sequence, Op.monitored_barrier)
        return tells_us or self.local.monitored_barriers(local) < number

    def next_sequence(self) -> int:
        return self._queue.number + 1

    def interrupted_here(self) -> bool:
        here = self._fast_path.runner == threading.get_ident() or self._queue.has_turn_here()
        return here or self.local.interrupted_here()

    def under_way(self) -> str:
        if not self.interrupted_here():
            return "a message"
        number = self._number if self._fast_path.runner != threading.get_ident() else self._fast_path.under_way[0]
        records = [r for r in self._log.records([], self._fast_path.records()) if r.number == number]
        return f"{records[-1].operation} #{number}" if records else f"collective #{number}"

    def abort(self) -> None:
        self.health.abort()
        self.local.abort()

    def interrupt(self) -> None:
        self.health.abort(status=native.INTERRUPTED)
        self.local.abort()

    def leave(self) -> None:
        if not self.health.over:
            self.health.tell_what_this_host_knows()
        self.health.over = True
        self._fast_path.stop()
        self.detector.leave()
        self._queue.close()
        self._messages.close()
        self.local.leave()

    def close(self) -> None:
        if not self.health.over:
            self.leave()
        self.detector.close()
        heard_of(self, self.detector.trouble(native.NEVER))
        if self.meeting_point is not None:
            self.meeting_point.close()
        healthy = self._sound and self.health.sound()
        self.local.close()
        self._progress.close()
        # MPI keeps a communicator, of which a process has 2,000 or so, until its last request is freed. None of
        # `pipelined` is under way: it gives up its own.
        self.pipelined.free()
        if self.limits is not None:
            for small in (self.leader, self.flat):
                small.free() if healthy else small.give_up()
        for requests, memory in self.told:
            self.link.give_up(requests, memory)  # nobody may receive them: the communicator is for no other group
        self.link.close(healthy)

    def complete(self, token: int) -> None:
        self.local.complete(token)

    # --- one collective

    def _execute(self, number: int, call: Call) -> BaseException | None:
        with without_functions():  # a waiting thread's may be on
            return self._attempt(number, call)

    def _attempt(self, number: int, call: Call) -> BaseException | None:
        self._number = number
        nbytes = sum(t.nbytes for t in call.inputs), sum(t.nbytes for t in call.outputs)
        started = self._log.begin(number, call.op, call.redop, call.dtype, call.root, call.count, *nbytes) * 1e-9
        collective = TwoLevelCollective(self, number, call, started + call.timeout)
        try:
            self.health.check_quickly(number)
            self._carry_out(number, call, started + call.timeout, collective)
            self._log.end(native.OK)
            return self._messages.refusal(call)  # of a message before
        except (Trouble, TransportError, self.link.MPI.Exception) as failure:
            error = self._error(failure, call, started, number, self._log.end)
            collective.withdraw()
            return error
        except BaseException:
            # A signal handler raised. The others must not wait for what will not come.
            self._log.end(native.INTERRUPTED)
            self.health.abort(number, native.INTERRUPTED)
            collective.withdraw()
            raise

    def _carry_out(self, number: int, call: Call, deadline: float, collective: TwoLevelCollective) -> None:
        agree, move = choose(call, self.limits)
        if move is Move.LEADERS:
            return self.leader.run(number, call, deadline)
        if move is Move.FLAT:
            if self.flat.run(number, call, deadline):
                return None
            move = Move.TWO_LEVEL
        elif agree is Agree.LEADERS:
            self.leader.announce(number, call, deadline)
        elif agree is Agree.FLAT:
            self.flat.announce(number, call, deadline)
        elif agree is Agree.ROUNDS:
            collective.agree()
        if move is Move.REJECTED:
            self.refused = {n: told for n, told in self.refused.items() if n > number - _REFUSED} | {number: call}
            collective.reject()
        elif move is Move.PIPELINED:
            self.pipelined.reduce(number, call, deadline, 0, None)
        elif move is Move.TWO_LEVEL:
            collective.run()

    def _error(
        self, trouble: Exception, call: Call, started: float, number: int, end: Callable[[int], None]
    ) -> BaseException:
        """The exception for a call that failed. ``end``: told the native status."""
        if not isinstance(trouble, Trouble):
            trouble = self.health.explain(trouble)
        end(getattr(trouble, "status", native.ABORTED))
        self._sound = False
        if isinstance(trouble, TransportError):
            self.health.abort(number)
            self.failed(trouble)
            return trouble
        if trouble.status == native.PEER_LOST:
            trouble = self.health.why_left(trouble)
        if trouble.status in (native.TIMEOUT, native.PEER_LOST, native.MISMATCH):
            self.health.spread(Fault(trouble.status, trouble.peer, self.rank, number))
        elif trouble.status == native.EXHAUSTED:
            self.health.abort(number)
        trouble.call = number
        trouble.seq = trouble.seq or number
        trouble.elapsed_ns = int((time.monotonic() - started) * 1e9)
        return HostsErrorText(self, trouble, call).exception()

    def _message_error(self, trouble: Trouble, message: Message, since: float) -> BaseException:
        trouble.elapsed_ns = int((time.monotonic() - since) * 1e9)
        return HostsErrorText(self, trouble, message).exception()

    # --- the trace

    def trace(self) -> list[Record]:
        # Of the native group only the messages: its collectives are steps of ours.
        inside = [r for r in self.local.trace() if r.is_message]
        for record in inside:
            record.peer = self.hosts.here[record.peer] if record.peer >= 0 else -1
        return sorted(
            self._log.records(self._queue.queued(), self._fast_path.records()) + inside, key=lambda r: r.issued
        )

    def peers(self) -> list[Peer]:
        # Nobody here knows how far the ranks of other hosts have come.
        inside = {self.hosts.here[p.rank]: p for p in self.local.peers()}
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

    # --- names, for errors

    def who(self, rank: int) -> str:
        return f"{rank_name(self.members, rank)} on {self.locations[rank].hostname}"

    def _who_local(self, index: int) -> str:
        return self.who(group_rank(self.hosts, index))

    def _check_collective(self, peers: Sequence[int]) -> None:
        self.health.check(peers, self._number)


def all_well(said: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks know once a group over hosts is opened, of what each has said; rank 0's. TransportError if one
    cannot take part."""
    errors = [s["error"] for s in said if s["error"]]
    if errors:
        raise TransportError("; ".join(dict.fromkeys(errors)))
    if len({s["chunk"] for s in said}) > 1:  # what one sends would be shorter or longer than what another waits for
        each = ", ".join(f"rank {r}: {s['chunk']}" for r, s in enumerate(said))
        raise TransportError(f"C10D_CUSTOM_CHUNK_BYTES differs between the ranks ({each})")
    # The token: of what this group says in the store later, no other of its name shall take for its own.
    return {
        "ranks": [s["rank"] for s in said],
        "token": secrets.token_hex(8),
        "offers": [s["offer"] for s in said],
        "secret": secrets.token_hex(32),
    }


def _listener(transport: HierarchicalTransport) -> Callable[[Fault], None]:
    """What the detector's thread calls: it does not keep a group that nobody has any more."""
    record, found = transport.health.record, weakref.ref(transport)

    def hear(fault: Fault) -> None:
        record(fault)
        if (group := found()) is not None:
            tell_what_was_refused(group, fault)

    return hear
