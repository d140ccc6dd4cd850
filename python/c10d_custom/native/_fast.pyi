"""backend/python: calls into the core in C, for every CPython that has a global interpreter lock. The functions of the
core take the address of the one they call first, and its arguments as api.h has them. They run without the GIL."""

from typing import Any

class FastCollective:
    """See fast_collective.py."""

    def __init__(self, function: int, handle: int, rank: int, size: int, submit: int = 0, /) -> None: ...
    def run(self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, /) -> int: ...
    def submit(
        self, op: int, source: Any, target: Any, root: int, redop: Any, nanoseconds: int, ticket: list[int], /
    ) -> int: ...
    def close(self) -> None: ...

def settle(function: int, handle: int, ticket: int, nanoseconds: int, may_run: bool, /) -> int: ...
def message(
    function: int,
    handle: int,
    kind: int,
    peer: int,
    tag: int,
    address: int,
    count: int,
    nanoseconds: int,
    wait: int,
    ticket: list[int],
    /,
) -> bool: ...
def set_up(exchange: object, types: tuple[type, ...], is_neg: object, is_conj: object, known: bytes, /) -> None: ...
def raw_tensor(tensor: Any, /) -> tuple[int, int, int] | None: ...
def set_up_kinds(dtypes: bytes, operations: bytes, /) -> None: ...
