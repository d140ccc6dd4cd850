"""backend/python: what is there where Python's headers were when this package was built. The functions of the core take
the address of the one they call first, and its arguments as api.h has them. Without the GIL while they run."""

from typing import Any

def all_reduce(function: int, handle: int, address: int, count: int, kind: int, nanoseconds: int, /) -> int: ...
def fast_collective(
    function: int,
    handle: int,
    kind: int,
    root: int,
    source: int | bytes | None,
    target: int | bytes | None,
    count: int,
    nanoseconds: int,
    /,
) -> int: ...
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
    ticket: list[int],
    /,
) -> bool: ...
def set_up(exchange: object, types: tuple[type, ...], is_neg: object, is_conj: object, known: bytes, /) -> None: ...
def raw_tensor(tensor: Any, /) -> tuple[int, int, int] | None: ...
def raw_parts(tensors: Any, n: int, code: int, elements: int, /) -> bytes | None: ...
