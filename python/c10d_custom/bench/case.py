"""What one measurement is of: an operation, on how many bytes of what, with what options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .. import call

ROOTED = tuple(op.name for op in call.ROOTED)
REDUCING = tuple(op.name for op in call.REDUCING)
# nccl-tests' names beside torch's.
_ALIASES = {"half": torch.float16, "float": torch.float32, "double": torch.float64}


class Unavailable(Exception):
    """This reference cannot be timed here, or not on this case; the message says why, and what would help."""


@dataclass(frozen=True)
class Case:
    operation: str
    count: int  # elements of the largest buffer
    dtype: torch.dtype
    redop: str | None  # "SUM", ...; None where the operation does not reduce
    root: int  # -1 where the operation has none
    asynchronous: bool
    rank: int
    size: int  # ranks

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def dtype_named(name: str) -> torch.dtype:
    """KeyError for a name that is no dtype's."""
    dtype = _ALIASES.get(name, getattr(torch, name, None))
    if not isinstance(dtype, torch.dtype):
        raise KeyError(name)
    return dtype


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def there_and_back(rank: int, send: Callable[[], object], recv: Callable[[], object]) -> Callable[[], None]:
    """The call of one of the two ranks of a round trip, which rank 0 begins."""

    def first_rank() -> None:
        send()
        recv()

    def last_rank() -> None:
        recv()
        send()

    return last_rank if rank else first_rank
