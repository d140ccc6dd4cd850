"""What one measurement is of: an operation, on how many bytes of what, with what options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


class Reference:
    """What an operation is timed by. ``checked``: whether it computes what the operation asks for; ``barrier``: of all
    ranks."""

    checked = True
    barrier: Callable[[], object]

    def repeats(self, case: Case) -> int:
        """How often the function of `bind` does the operation."""
        return 1

    def bind(self, case: Case, buffers: Any) -> Callable[[], object]:
        """The function to be timed, on these Buffers (operations.py). Raises Unavailable."""
        raise NotImplementedError


def there_and_back(rank: int, send: Callable[[], object], recv: Callable[[], object]) -> Callable[[], None]:
    """The call of one rank of those that pass something on until it is back at rank 0, which begins."""

    def first_rank() -> None:
        send()
        recv()

    def other_rank() -> None:
        recv()
        send()

    return other_rank if rank else first_rank
