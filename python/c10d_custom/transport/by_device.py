"""A group's tensors by device: those of the CPU go to one transport, those of GPUs to another, in one order.

Until the first CUDA tensor comes, everything goes straight to the CPU transport. From then on a queue holds
the collectives of all devices, for a collective of CUDA tensors takes several steps of the CPU transport.

A rank may use several GPUs, each by a transport of its own. Those of the ranks belong together by the order in which
collectives came to them first: a GPU's number in it, its ordinal, is part of what ranks compare of a call.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

from ..call import Call, Op
from ..errors import CustomBackendError, TransportError, UsageError
from ..threads import threading, time
from . import Transport

if TYPE_CHECKING:
    import torch

    from ..call import Message
    from ..config import Config
    from . import LocalTransport, Ticket
    from .cuda.transport import CudaTransport
    from .tickets import Queue


def _of_cpu(name: str) -> Any:
    """The method of that name which the transport of CPU tensors answers for all devices."""

    def method(self: ByDevice, *arguments: Any) -> Any:
        return getattr(self.cpu, name)(*arguments)

    return method


class ByDevice(Transport):
    """Owns ``cpu``, a transport of CPU tensors; ``one_host``: whether its ranks share one; ``devices``: the types of
    those that the group was made for, None for all. A call or message on a device goes through `issue` first.
    ``strangers``: whether its ranks share no default group, so that ``members`` are their ranks in this group alone;
    ``first``: its streams on GPUs are of the highest priority; ``timed``: whether it is wanted how long calls take
    there."""

    strangers = first = timed = False

    def __init__(self, cpu: Transport, config: Config, one_host: bool, devices: list[str] | None = None) -> None:
        self.cpu, self.config, self.one_host, self.device_types = cpu, config, one_host, devices
        self.rank, self.size, self.members = cpu.rank, cpu.size, cpu.members
        me = weakref.ref(self)

        def pass_on(error: BaseException) -> None:
            if (here := me()) is not None:
                here.failed(error)

        cpu.on_failure(pass_on)
        self._changed = threading.Condition()
        self._opening: int | None = None  # the thread that makes a CudaTransport
        self._cuda: dict[torch.device, CudaTransport] = {}
        self._ordinals: dict[torch.device, int] = {}  # of those that collectives have come to
        self._close_all: Any = None  # of cuda.transport, once that is wanted
        self._queue: Queue | None = None
        self._here = threading.local()
        self.fast_collective, self.fast_submit = cpu.fast_collective, cpu.fast_submit
        self.fast_message = cpu.fast_message

    @property
    def name(self) -> str:
        return self.cpu.name

    @name.setter
    def name(self, name: str) -> None:
        self.cpu.name = name

    # --- what is on a device

    def issue(self, call: Call | Message) -> None:
        """UsageError if the call cannot be made, before any rank is told of it."""
        device = cast("torch.device", call.device)
        if self.device_types is not None and device.type not in self.device_types:
            raise UsageError(
                f"{call.name}: "
                f"the tensors are on {device}, but group {self.name} was made for {', '.join(self.device_types)} only"
            )
        cuda = self._cuda.get(device) or self._open(device)
        if not isinstance(call, Call):
            return cuda.issue(call)
        if call.op is not Op.barrier:
            with self._changed:
                call.ordinal = self._ordinals.setdefault(device, len(self._ordinals))
            return cuda.issue(call)
        beside: list[Any] = []
        for other in self._cuda.values():
            if other is not cuda:
                other.issue(call)
                beside.append(call.stream_op)
        cuda.issue(call)
        cast("Any", call.stream_op).beside = beside
        return None

    def _open(self, device: torch.device) -> CudaTransport:
        """Its CudaTransport. Made without the lock: it takes its time, and may be interrupted by a handler that calls
        this, too."""
        with self._changed:
            if self._opening == threading.get_ident():
                raise UsageError(
                    f"group {self.name}, rank {self.rank}: this thread is amid its first call on {device}, and has "
                    "been interrupted by a signal handler that calls the group. "
                    "Call it afterwards, or use another group there."
                )
            self._changed.wait_for(lambda: self._opening is None)
            if device in self._cuda:
                return self._cuda[device]
            self._opening = threading.get_ident()
        try:
            from .cuda import driver as cuda_driver  # not before: most groups have no tensors there
            from .cuda.transport import CudaTransport, close_all
            from .tickets import Queue

            driver = cuda_driver.driver_of(device)
            cuda = CudaTransport(self, driver)
            if self._queue is None:
                self._queue = Queue(self._execute, self.cpu.complete, self.cpu.name, weakref.proxy(self))
                self.fast_collective = self.fast_submit = None
            self._close_all = close_all
            self._cuda[device] = cuda
            return cuda
        finally:
            with self._changed:
                self._opening = None
                self._changed.notify_all()

    def registered(self, device: torch.device, nbytes: int, seconds: float) -> torch.Tensor | None:
        """Of `CudaTransport.registered`, once a collective has come to that GPU."""
        return self._cuda[device].registered(self, nbytes, seconds)

    def time_calls(self) -> None:
        """From now on it is wanted how long calls take on GPUs."""
        self.timed = True

    def gpus(self) -> list[str]:
        """The GPUs that this rank's collectives have come to, by their ordinals."""
        return [self._cuda[device].driver.uuid for device in list(self._ordinals)]

    def devices(self) -> list[torch.device]:
        """Returns the devices of which this rank has used tensors."""
        return list(self._cuda)

    def _execute(self, number: int, call: Call) -> BaseException | None:
        self._here.depth = getattr(self._here, "depth", 0) + 1
        try:
            if call.device is None:
                self.cpu.run(call)
            elif call.op is Op.barrier:
                self._barrier(call)
            else:
                self._cuda[call.device].execute(call)
            return None
        except CustomBackendError as error:
            return error.with_traceback(None)  # whose frames would keep the call's tensors
        except Exception as error:
            self.cpu.abort()
            return TransportError(f"{call.name}: {type(error).__name__}: {error}")
        except BaseException:
            # A signal handler raised. The others must not wait for what will not come.
            self.cpu.abort()
            raise
        finally:
            self._here.depth -= 1

    def _barrier(self, call: Call) -> None:
        """Waits until all ranks have done what they had queued before it, on any of their GPUs."""
        last: Any = call.stream_op
        deadline = time.monotonic() + call.timeout
        by_driver = {cuda.driver: cuda for cuda in list(self._cuda.values())}
        for stream_op in (*last.beside, last):
            by_driver[stream_op.driver].settle(call, stream_op, deadline)
        self.cpu.run(call)

    # --- the Transport's face

    agree = _of_cpu("agree")
    posted_message = _of_cpu("posted_message")
    last_error = _of_cpu("last_error")
    next_completed = _of_cpu("next_completed")
    complete = _of_cpu("complete")
    next_sequence = _of_cpu("next_sequence")
    enter_monitored_barrier = _of_cpu("enter_monitored_barrier")
    under_way = _of_cpu("under_way")
    trace = _of_cpu("trace")
    peers = _of_cpu("peers")
    broken = _of_cpu("broken")
    gone = _of_cpu("gone")
    shrinking = _of_cpu("shrinking")
    abort = _of_cpu("abort")
    interrupt = _of_cpu("interrupt")

    def run(self, call: Call) -> None:
        if self._queue is None:
            return self.cpu.run(call)
        if call.stream_op is not None and call.stream_op.captured:
            return  # `issue` has launched it
        error = self._queue.run(call)
        if error is not None:
            raise error
        if call.stream_op is not None and call.op is not Op.barrier:
            call.stream_op.join()

    def submit(self, call: Call) -> Ticket:
        if self._queue is None:
            return self.cpu.submit(call)
        if call.stream_op is not None and call.stream_op.captured:
            from .tickets import PyTicket

            ticket = PyTicket(self.cpu.complete)
            ticket.finish()
            return ticket
        return self._queue.submit(call)

    def post(self, message: Message) -> Ticket:
        if message.stream_op is None:
            return self.cpu.post(message)
        return self._cuda[cast("torch.device", message.device)].post(message)

    def in_a_collective_instead(self, number: int) -> tuple[bool, list[int]]:
        if self._queue is not None and not self._queue.idle():  # what it holds takes collectives of `cpu`
            return False, []
        return self.cpu.in_a_collective_instead(number)

    def interrupted_here(self) -> bool:
        # Calls are carried out here only where there is a queue of them.
        return (self._queue is not None and getattr(self._here, "depth", 0) > 0) or self.cpu.interrupted_here()

    def leave(self) -> None:
        for cuda in self._cuda.values():
            cuda.prepare_to_leave()
        self.cpu.leave()
        if self._queue is not None:
            self._queue.close()
        for cuda in self._cuda.values():
            cuda.leave()

    def close(self) -> None:
        if self._close_all is not None:
            self._close_all(self.cpu, list(self._cuda.values()), self.one_host)
        elif self.one_host:  # another may have offered memory for a message
            cast("LocalTransport", self.cpu).holds_nothing()
        self.cpu.close()
