"""backend/python: calls into the core in C, for every CPython, one build for all that have a global interpreter lock.
The functions of the core take the address of the one they call first, and its arguments as api.h has them. They run
without the GIL, but `ask`, of functions that answer at once."""

from typing import Any

class FastCollective:
    """The direct way of one rank's collectives in one group."""

    def __init__(self, function: int, handle: int, rank: int, size: int, submit: int = 0, /) -> None: ...
    def run(self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, /) -> int:
        """Carries out ``op``, a native Op, in the calling thread. ``source``, ``target``: what it reads and writes,
        as c10d passes them: a tensor, or a list of one, for one part; a list of as many tensors as there are ranks,
        a list of such a list, or a tensor whose first dimension is cut into so many, for one part of each rank;
        where only the root has such a list, nothing or an empty list elsewhere; None for a barrier. ``root``: a
        group rank, -1 where there is none; ``redop``: a ReduceOp, looked at where the operation reduces;
        ``nanoseconds``: the time-out. Returns a status of native: OK; SLOW_PATH where nothing was begun, as the
        tensors are of another kind or make no sense; or what the function has returned."""

    def submit(
        self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, ticket: list[int], /
    ) -> int:
        """The same without waiting: OK, and the ticket's address is in the list; or SLOW_PATH."""

    def close(self) -> None:
        """Sends both on the slow path from now on. To be called while nobody is in either."""

class CoreTicket:
    """An operation under way in the core, as Python holds it. ``address``: of the core's ticket, which is released with
    this; ``status``: of native, PENDING until `done` or `settle` has seen the end."""

    address: int
    status: int
    def hold(self, handle: int, at: Any, /) -> None:
        """Takes over the ticket whose address is ``at[0]``, and puts None there. ``handle``: its group's, which is to
        outlive it."""

    def done(self) -> bool: ...
    def settle(self, nanoseconds: int, may_run: bool, /) -> bool:
        """`done`, after a wait of up to so long, as c10d_settle."""

class CoreWindow:
    """A window of the core, as Python holds it. ``address``: of the core's, which is freed with this. Its calls return
    a status of native, or SLOW_PATH where they have done nothing. ``rank``: the peer; ``offset``: in items of what it
    has registered."""

    address: int
    def __init__(self, address: int, /) -> None: ...
    def put(self, tensor: Any, rank: Any, offset: Any, /) -> int: ...
    def signal(self, rank: Any, /) -> int: ...
    def wait(self, rank: Any, nanoseconds: int, /) -> int: ...

def set_up_core(*addresses: int) -> None: ...
def ask(function: int, address: int | None, /) -> int: ...
def message(
    function: int,
    handle: int,
    ranks: int,
    tensors: Any,
    is_recv: bool,
    peer: Any,
    tag: Any,
    nanoseconds: int,
    wait: int,
    ticket: list[int],
    /,
) -> int: ...
def set_up(exchange: object, dtypes: bytes, /) -> None: ...
def set_up_inside(*numbers: object) -> None: ...
def goes_direct(*arguments: object) -> bool: ...
def nobody_watches() -> bool: ...
def raw_tensor(tensor: Any, /) -> tuple[int, int, int] | None: ...
def set_up_kinds(dtypes: bytes, operations: bytes, /) -> None: ...
