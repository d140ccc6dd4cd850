"""What the store tells of ranks that did not come to a group which is being made: that they came to another, by
mistake. For the end of an error."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from .attempt import KEY
from .exchange import peek
from .membership import digest_of

if TYPE_CHECKING:
    from torch.distributed import Store

    from .bounded_store import BoundedStore

_MORE = 16  # sizes looked for, beside twice the group's own
_MOST = 256  # ranks looked for


def elsewhere(given: Store, custom: BoundedStore, rank: int, size: int) -> str:
    """``given``: the store by which torch makes the group, for whatever backend; ``custom``: our part of it."""
    with contextlib.suppress(RuntimeError):
        others = [r for r in range(min(size, _MOST)) if r != rank]
        at_gloo = [r for r in others if _came_with_gloo(custom.of(given), r)]
        if at_gloo:
            return (
                f" Rank{'s' * (len(at_gloo) > 1)} {', '.join(map(str, at_gloo))} came with another backend, gloo: give "
                "all ranks the same."
            )
        sizes = [s for s in range(1, 2 * size + _MORE) if s != size and _announced(custom, s)] if rank else []
        if sizes:
            return (
                f" A rank 0 has made a group of {' and one of '.join(map(str, sizes))} ranks here, where this rank was "
                f"told {size}: give all of them the same size."
            )
    return ""


def _came_with_gloo(store: BoundedStore, rank: int) -> bool:
    """gloo's ranks say there how they are reached."""
    return peek(store.under("0"), f"{rank}") is not None


def _announced(store: BoundedStore, size: int) -> bool:
    return peek(store.under(digest_of(list(range(size)))), KEY) is not None
