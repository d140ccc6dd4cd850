"""What torch sees: the process group and the Backend, Work, registration, what torch.distributed offers beyond
operations (shrinking, profiling), and how a group is made of the packages below. Everything below may be imported from
here; nothing of this package is imported by those."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# What this backend is called by users, and by whatever reads the name of a group.
NAME = "custom"
# By `_get_backend_name`. A group of torch's own answers NAME there for every backend that torch does not know;
# libraries (torchrec 1.9) take such a group for a fake one, and leave its communication out.
IMPLEMENTATION = "c10d_custom"
# Other backends' names under which groups of this one are made, too: replacing.py.
replaced: set[str] = set()

_told: set[str] = set()  # features of which `optional` has said that they are off


def served_devices() -> list[str]:
    """The types of device whose tensors this backend takes."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Served(Sequence):
    """`served_devices`, found out whenever it is read: whether there is a GPU is nothing to ask a driver at `import
    torch`, and CUDA_VISIBLE_DEVICES may be set later. ``named``: called whenever torch reads it, as it does once a
    group names this backend."""

    def __init__(self, named: Callable[[], None] = lambda: None) -> None:
        self._named = named

    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            self._named()
        return served_devices()[index]

    def __len__(self) -> int:
        return len(served_devices())


@contextlib.contextmanager
def optional(feature: str) -> Iterator[None]:
    """Inside, any Exception turns ``feature`` (a few words) off for what is being made, as this torch lacks a private
    name that it rests on (torch_private.py): a warning says so once, and all else goes on."""
    try:
        yield
    except Exception as error:
        if feature not in _told:
            _told.add(feature)
            import torch

            warnings.warn(
                f"c10d-custom: {feature} is off, because torch {torch.__version__} does not have what it rests on "
                f"({type(error).__name__}: {error})",
                RuntimeWarning,
                stacklevel=3,
            )
