"""The face to torch.distributed: unpacks c10d's arguments, asks `Lowering` for a Call, issues it, and
returns a Work. Only this file knows c10d's names.

A Python override shadows every C++ overload of its name, so each method takes the forms that c10d's
callers use: an options object by position or keyword, none, or the short forms
(``pg.allreduce(tensor, op, timeout)``), whose positional arguments stand one place before ours.
"""
import atexit
import contextlib
import functools
import signal
import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from . import dtypes, sparse
from .collectives import Lowering, only, own_list
from .config import Config, restart_attempt
from .device_backend import DeviceBackend
from .dynamo import opaque_to_dynamo
from .errors import UsageError
from .exchange import Exchange
from .liveness import Members
from .membership import Membership
from .monitored_barrier import monitored_barrier
from .mpi_job import abandon, job
from .ordinary import ordinary
from .profiling import recorded
from .quick import Quick
from .topology import by_host, places, require_mpi, require_one_user
from .trace import dump as trace
from .transport.devices import ByDevice
from .transport.hierarchical import HierarchicalTransport
from .transport.shm import ShmTransport
from .work import Completer, DeviceWork, DoneMessage, DoneWork, Work

_profiler_enabled = torch.autograd._profiler_enabled
_live = weakref.WeakSet()
_ready = None   # see ready_made


@functools.cache
def _config():
    return Config.from_env()


def create(options):
    """Builds the group for torch's _DistributedBackendOptions. Collective over the group's ranks;
    TransportError on all of them if any cannot take part."""
    global _ready
    if _ready is not None:
        group, _ready = _ready, None
        group.setGroupName(options.group_id)
        return group
    return build(options.store, options.group_rank, options.group_size, options.timeout,
                 options.group_id, list(options.global_ranks_in_group))


@contextlib.contextmanager
def ready_made(group):
    """Inside, the next `create` takes this group, which has been made already."""
    global _ready
    _ready = group
    try:
        yield
    finally:
        _ready = None


def live():
    """The groups of this process."""
    return list(_live)


def build(store, rank, size, timeout, name, members=None, processes=None):
    """``processes``: a liveness.Processes, if the caller knows more than the ranks will tell."""
    # A store may see the same group name again after destroy_process_group: count the lives. So may it
    # after a restart by torchrun, whose agent keeps one store; a rank that failed before it came here
    # has not counted that life, hence the attempt.
    store = PrefixStore(f"custom/{restart_attempt()}", store)
    members = members or list(range(size))
    with Membership(store, rank, members, name) as membership:
        store = PrefixStore(membership.digest, store)
        life = store.add(f"lives/{rank}", 1)
        exchange = Exchange(PrefixStore(f"{life}", store), rank, size, timeout.total_seconds(),
                            processes or _members_of_world(members), membership.look)
        trace.install_signal(_config())
        try:
            transport = _transport(exchange, name, members)
        except BaseException as error:
            exchange.give_up(error)
            raise
        finally:
            exchange.processes.close()
    trace.follow(transport, _config())
    return CustomProcessGroup(transport, store, rank, size, timeout, name)


def _members_of_world(members):
    """liveness.Members for ``members``, global ranks, if the default group has a segment in which to look."""
    world = dist.group.WORLD
    board = world.cpu_transport if members and isinstance(world, CustomProcessGroup) else None
    return Members(board, members, roll=True) if isinstance(board, ShmTransport) else None


def _transport(exchange, name, members):
    everywhere = places(exchange)
    require_one_user(everywhere)
    if len(by_host(everywhere)) == 1:
        return ByDevice(ShmTransport(exchange, _config(), name, members), _config(), one_host=True)
    require_mpi(exchange, everywhere)
    return ByDevice(HierarchicalTransport(exchange, _config(), name, members, everywhere, job(exchange.left()), abandon),
                    _config(), one_host=False)


@opaque_to_dynamo
class CustomProcessGroup(ProcessGroup):
    def __init__(self, transport, store, rank, size, timeout, name):
        super().__init__(rank, size)
        self._transport = transport
        self._store = store
        self._group_rank, self._group_size = rank, size
        self._timeout = timeout
        self._seconds = timeout.total_seconds()
        self._nanoseconds = int(self._seconds * 1e9)
        self._name, self._desc = name, ""
        self._lower = Lowering(rank, size)
        self._quick = Quick(transport, self._lower)
        self._completer = Completer(transport, name)
        self._coalescing = None
        self._monitored_barriers = 0
        self._splits = 0
        self._closed = False
        _live.add(self)

    # --- identity and settings

    def getBackendName(self):
        return "custom"

    def getGroupName(self):
        return self._name

    def setGroupName(self, name):
        self._name = self._transport.name = name

    def getGroupDesc(self):
        return self._desc

    def setGroupDesc(self, desc):
        self._desc = desc

    def getRank(self):
        return self._group_rank

    def getSize(self):
        return self._group_size

    def get_group_store(self):
        return self._store

    @property
    def timeout(self):
        return self._timeout

    @property
    def cpu_transport(self):
        """The transport of its CPU tensors."""
        return self._transport.cpu

    @property
    def _device_types(self):
        return [torch.device("cpu"), torch.device("cuda")] if torch.cuda.is_available() else [torch.device("cpu")]

    def _get_backend(self, device):
        return DeviceBackend(self)

    def _get_backend_name(self):
        return self.getBackendName()

    def _has_hooks(self):
        return False

    def _wait_for_pending_works(self):
        self._completer.wait_all(self._seconds)

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return self._transport.next_sequence() - 1

    def set_timeout(self, timeout):
        self._timeout = timeout
        self._seconds = timeout.total_seconds()
        self._nanoseconds = int(self._seconds * 1e9)

    _set_default_timeout = set_timeout

    # --- collectives

    def broadcast(self, tensors, opts=None, root=None, timeout=None):
        if (ns := self._quick_ns(opts, BroadcastOptions)) and len(tensors) == 1 and (
                self._quick.broadcast(tensors[0], opts.rootRank, ns)):
            return None
        if isinstance(opts, int):
            opts, root, timeout = None, opts, timeout if root is None else root
        tensor = self._lowered(only, tensors, "broadcast")
        root = opts.rootRank if opts is not None else root or 0
        return self._collective("broadcast", opts, timeout, [tensor], self._lower.broadcast, tensor, root)

    def allreduce(self, tensors, opts=None, op=None, timeout=None):
        if isinstance(opts, AllreduceOptions):
            op = opts.reduceOp
            if self._may_be_short(opts.asyncOp) and len(tensors) == 1 and (found := ordinary(tensors[0])) and (
                    kind := dtypes.kind_of(found[2], op)):
                self._transport.quick_all_reduce(found[0], found[1], kind, self._limit, opts)
                return None  # as NCCL's: c10d asks for no Work of a synchronous call, and making one takes time
        elif opts is not None:
            opts, op, timeout = None, opts, timeout if op is None else op
        tensor = self._lowered(only, tensors, "all_reduce")
        if op is None:
            op = ReduceOp.SUM
        if tensor.is_sparse:
            return self._sparse_all_reduce(tensor, op, opts, timeout)
        return self._collective("all_reduce", opts, timeout, [tensor], self._lower.all_reduce, tensor, op)

    def allreduce_coalesced(self, tensors, opts=None):
        op = opts.reduceOp if opts is not None else ReduceOp.SUM
        return self._coalesced("all_reduce", opts, list(tensors), self._lower.all_reduce, [(t, op) for t in tensors])

    def reduce(self, tensors, opts=None, root=None, op=None, timeout=None):
        if (ns := self._quick_ns(opts, ReduceOptions)) and len(tensors) == 1 and (
                self._quick.reduce(tensors[0], opts.rootRank, opts.reduceOp, ns)):
            return None
        if isinstance(opts, int):
            if root is not None:
                root, op, timeout = None, root, timeout if op is None else op
            opts, root = None, opts
        tensor = self._lowered(only, tensors, "reduce")
        root = opts.rootRank if opts is not None else root or 0
        op = opts.reduceOp if opts is not None else op if op is not None else ReduceOp.SUM
        return self._collective("reduce", opts, timeout, [tensor], self._lower.reduce, tensor, root, op)

    def allgather(self, output_lists, inputs, opts=None, timeout=None):
        if (ns := self._quick_ns(opts, AllgatherOptions)) and len(inputs) == 1 and (
                self._quick.all_gather(own_list(output_lists), inputs[0], ns)):
            return None
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        tensor = self._lowered(only, inputs, "all_gather")
        outputs = own_list(output_lists)
        return self._collective("all_gather", opts, timeout, list(outputs), self._lower.all_gather, outputs, tensor,
                                inputs=[tensor])

    def allgather_coalesced(self, output_lists, inputs, opts=None):
        # c10d passes, for each rank, one output for each input.
        per_input = [[of_rank[i] for of_rank in output_lists] for i in range(len(inputs))]
        return self._coalesced("all_gather", opts, [t for outs in per_input for t in outs],
                               self._lower.all_gather, list(zip(per_input, inputs)), inputs=inputs)

    def all_gather_single(self, output, input, opts=None, timeout=None):
        if (ns := self._quick_ns(opts, AllgatherOptions)) and self._quick.all_gather_single(output, input, ns):
            return None
        return self._collective("_all_gather_base", opts, timeout, [output], self._lower.all_gather_single,
                                output, input, inputs=[input])

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._coalesced("all_gather_into_tensor_coalesced", opts, list(outputs),
                               self._lower.all_gather_single, list(zip(outputs, inputs, strict=True)), inputs=inputs)

    def reduce_scatter(self, outputs, input_lists, opts=None, op=None, timeout=None):
        if (ns := self._quick_ns(opts, ReduceScatterOptions)) and len(outputs) == 1 and (
                self._quick.reduce_scatter(outputs[0], own_list(input_lists), opts.reduceOp, ns)):
            return None
        if opts is not None and not hasattr(opts, "asyncOp"):
            opts, op, timeout = None, opts, timeout if op is None else op
        output = self._lowered(only, outputs, "reduce_scatter")
        inputs = own_list(input_lists)
        op = opts.reduceOp if opts is not None else op if op is not None else ReduceOp.SUM
        return self._collective("reduce_scatter", opts, timeout, [output], self._lower.reduce_scatter,
                                output, inputs, op, inputs=inputs)

    def reduce_scatter_single(self, output, input, opts=None, timeout=None):
        if (ns := self._quick_ns(opts, ReduceScatterOptions)) and (
                self._quick.reduce_scatter_single(output, input, opts.reduceOp, ns)):
            return None
        op = opts.reduceOp if opts is not None else ReduceOp.SUM
        return self._collective("_reduce_scatter_base", opts, timeout, [output],
                                self._lower.reduce_scatter_single, output, input, op, inputs=[input])

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        op = opts.reduceOp if opts is not None else ReduceOp.SUM
        return self._coalesced("reduce_scatter_tensor_coalesced", opts, list(outputs),
                               self._lower.reduce_scatter_single,
                               [(o, i, op) for o, i in zip(outputs, inputs, strict=True)], inputs=inputs)

    def alltoall(self, outputs, inputs, opts=None, timeout=None):
        if (ns := self._quick_ns(opts, AllToAllOptions)) and self._quick.all_to_all(outputs, inputs, ns):
            return None
        return self._collective("all_to_all", opts, timeout, list(outputs), self._lower.all_to_all, outputs, inputs,
                                inputs=inputs)

    def all_to_all_single(self, output, input, output_splits=(), input_splits=(), opts=None, timeout=None):
        if (ns := self._quick_ns(opts, AllToAllOptions)) and not output_splits and not input_splits and (
                self._quick.all_to_all_single(output, input, ns)):
            return None
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        return self._collective("all_to_all", opts, timeout, [output], self._lower.all_to_all_single,
                                output, input, list(output_splits), list(input_splits), inputs=[input])

    def gather(self, output_lists, inputs, opts=None, root=None, timeout=None):
        if (ns := self._quick_ns(opts, GatherOptions)) and len(inputs) == 1 and (
                self._quick.gather(own_list(output_lists), inputs[0], opts.rootRank, ns)):
            return None
        if isinstance(opts, int):
            opts, root, timeout = None, opts, timeout if root is None else root
        tensor = self._lowered(only, inputs, "gather")
        root = opts.rootRank if opts is not None else root or 0
        outputs = own_list(output_lists)
        return self._collective("gather", opts, timeout, list(outputs), self._lower.gather, outputs, tensor, root,
                                inputs=[tensor])

    def scatter(self, outputs, input_lists, opts=None, root=None, timeout=None):
        if (ns := self._quick_ns(opts, ScatterOptions)) and len(outputs) == 1 and (
                self._quick.scatter(outputs[0], own_list(input_lists), opts.rootRank, ns)):
            return None
        if isinstance(opts, int):
            opts, root, timeout = None, opts, timeout if root is None else root
        output = self._lowered(only, outputs, "scatter")
        root = opts.rootRank if opts is not None else root or 0
        inputs = own_list(input_lists)
        return self._collective("scatter", opts, timeout, [output], self._lower.scatter, output, inputs, root,
                                inputs=inputs)

    def barrier(self, opts=None, timeout=None):
        if (ns := self._quick_ns(opts, BarrierOptions)) and self._quick.barrier(ns):
            return None
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        # For a group that has had CUDA tensors a barrier is one for the GPUs' work, too.
        devices = self._transport.devices()
        return self._collective("barrier", opts, timeout, [], self._lower.barrier, devices[-1] if devices else None)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        self._monitored_barriers += 1
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        monitored_barrier(self, self._monitored_barriers, seconds, wait_all_ranks)

    # Older names of the same operations; torch before 2.13 calls these.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- point to point

    def send(self, tensors, dst, tag=0):
        return self._message("send", tensors, dst, tag, self._seconds, is_recv=False)

    def recv(self, tensors, src, tag=0):
        return self._message("recv", tensors, src, tag, self._seconds, is_recv=True)

    def recv_anysource(self, tensors, tag=0):
        return self._message("recv", tensors, -1, tag, self._seconds, is_recv=True)

    # --- coalescing: operations go out as they come; the end gives one Work for all

    def _start_coalescing(self, device=None):
        self._coalescing = []

    def _end_coalescing(self, device=None):
        works, self._coalescing = self._coalescing or [], None
        return self._together(works)

    # --- life

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, devices=None):
        """A group of ``ranks`` (of this group, in that order); None on the other ranks. Every rank of
        this group calls it, with disjoint lists."""
        self._splits += 1
        if self._group_rank not in ranks:
            return None
        name = group_name or f"{self._name}:split:{self._splits}:{'_'.join(map(str, ranks))}"
        store = PrefixStore(f"split/{self._splits}/{'_'.join(map(str, ranks))}", self._store)
        members = [self._transport.members[r] for r in ranks]
        group = build(store, ranks.index(self._group_rank), len(ranks), timeout or self._timeout, name, members)
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        return group

    splitGroup = split_group

    def abort(self):
        self._transport.abort()

    def shutdown(self):
        if self._closed:
            return
        if self._transport.interrupted_here():
            # A signal handler, on top of a call of this very group: that call must end before the
            # group can. It fails now; what is left is closed at exit, or when asked again.
            self._transport.abort()
            return
        self._closed = True
        trace.forget(self._transport)
        self._transport.leave()
        self._completer.close()
        self._transport.close()
        self._completer.drop_all()

    # --- how everything above is issued

    def _may_be_short(self, asynchronous=False):
        """Whether a collective, or a message, may go the short way (quick.py)."""
        return not (asynchronous or self._coalescing is not None or _profiler_enabled())

    def _limit(self, opts):
        """The time-out in ns of a call with these options."""
        given = opts.timeout
        return self._nanoseconds if given.days < 0 or not given else int(given.total_seconds() * 1e9)

    def _quick_ns(self, opts, kind):
        """`_limit` of a collective other than all_reduce that may go the short way, else 0; ``kind``: the type of options
        that c10d gives."""
        if type(opts) is kind and self._transport.quick is not None and self._may_be_short(opts.asyncOp):
            return self._limit(opts)
        return 0

    def _sparse_all_reduce(self, tensor, op, opts, timeout):
        asynchronous, seconds = self._options(opts, timeout)
        with recorded(self, "all_reduce", []) as record:
            sizes = self._lowered(sparse.sizes, self._lower, tensor, op, seconds)
            self._transport.run(sizes)
            calls, finish = sparse.exchange(self._lower, tensor, sizes, seconds)
            if calls[0].device is not None:
                # What comes of them is added up on the current stream.
                for call in calls:
                    self._lowered(self._transport.issue, call)
                    self._transport.run(call)
                finish()
                return DoneWork([tensor], calls[-1].flight)
            work = self._adopt([self._transport.submit(c) for c in calls], [tensor], calls, record, finish)
        if not asynchronous:
            work.wait()
        return work

    def _options(self, opts, timeout):
        """(asynchronous, seconds). Without options: asynchronous, as the C++ overloads are."""
        given = opts.timeout if opts is not None else timeout
        seconds = self._seconds if given is None else given.total_seconds()
        return opts is None or opts.asyncOp, seconds if seconds > 0 else self._seconds

    def _lowered(self, lower, *arguments):
        try:
            return lower(*arguments)
        except UsageError:
            # The ranks whose arguments were fine must not wait for this one.
            self._transport.run(self._lower.rejected(self._seconds))
            raise

    def _collective(self, name, opts, timeout, tensors, lower, *arguments, inputs=None):
        """``tensors`` are what the operation leaves; a profiler is shown ``inputs``, or those where they are both."""
        asynchronous, seconds = self._options(opts, timeout)
        with recorded(self, name, tensors if inputs is None else inputs) as record:
            call = self._lowered(lower, *arguments, seconds)
            if call.device is not None:
                self._lowered(self._transport.issue, call)
            if not asynchronous and self._coalescing is None:
                self._transport.run(call)
                _copy_back(call)
                return DoneWork(tensors, call.flight)
            return self._adopt([self._transport.submit(call)], tensors, [call], record)

    def _coalesced(self, name, opts, tensors, lower, argument_lists, inputs=None):
        asynchronous, seconds = self._options(opts, None)
        with recorded(self, name, tensors if inputs is None else inputs) as record:
            # All are checked before any is issued.
            calls = [self._lowered(lower, *arguments, seconds) for arguments in argument_lists]
            for call in calls:
                if call.device is not None:
                    self._lowered(self._transport.issue, call)
            if not asynchronous and self._coalescing is None:
                for call in calls:
                    self._transport.run(call)
                    _copy_back(call)
                return DoneWork(tensors, calls[-1].flight if calls else None)
            return self._adopt([self._transport.submit(c) for c in calls], tensors, calls, record)

    def _message(self, name, tensors, peer, tag, seconds, is_recv):
        if self._transport.quick_message is not None and len(tensors) == 1 and self._may_be_short():
            ticket = self._quick.message(name, tensors[0], peer, tag, self._nanoseconds, is_recv)
            if ticket is None:
                return DoneMessage(list(tensors), peer if is_recv else -1)
            if ticket:
                work = Work(self._completer, [ticket], list(tensors), None, None)   # its tensors are all it needs
                self._completer.keep(work)
                return work
        tensor = self._lowered(only, tensors, name)
        with recorded(self, name if peer >= 0 else "recvAnySource", [tensor]) as record:
            message = self._lower.message(name, tensor, peer, tag, seconds, is_recv)
            if message.device is not None:
                self._transport.issue(message)
            return self._adopt([self._transport.post(message)], [tensor], [message], record)

    def _adopt(self, tickets, tensors, calls, record=None, then=None):
        """A Work for ``tickets``, which carry out ``calls``; ``then`` is called when they are done."""
        flights = [c.flight for c in calls if c.flight is not None]
        copies = [c for c in calls if c.copy_back and c.device is None]

        def finish():
            for call in copies:
                _copy_back(call)
            if then is not None:
                then()
            if record is not None:
                record.end()

        ends = bool(copies) or record is not None or then is not None
        if record is not None:
            record.goes_on()
        finish = finish if ends else None
        if flights:
            work = DeviceWork(self._completer, tickets, tensors, finish, calls, flights)
        else:
            work = Work(self._completer, tickets, tensors, finish, calls)
        self._completer.adopt(work, eager=ends)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _together(self, works):
        tickets = [t for w in works for t in w._tickets]
        tensors = [t for w in works for t in w._tensors]

        def finish():
            for w in works:
                w.settle()

        flights = [f for w in works if isinstance(w, DeviceWork) for f in w._flights]
        if flights:
            work = DeviceWork(self._completer, tickets, tensors, finish, works, flights)
        else:
            work = Work(self._completer, tickets, tensors, finish, works)
        self._completer.adopt(work, eager=False)
        return work


def _copy_back(call):
    if call.device is not None:
        return  # done on the stream of the call
    for destination, plain in call.copy_back:
        destination.copy_(plain.view(destination.shape))


@atexit.register
def _close_all():
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
        group.shutdown()
    if impatient:
        signal.signal(signal.SIGINT, signal.default_int_handler)
