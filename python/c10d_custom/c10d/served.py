"""The types of device whose tensors this backend takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def served_devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class Served(Sequence):
    """The same, found out whenever it is read: whether there is a GPU is nothing to ask a driver at `import torch`, and
    CUDA_VISIBLE_DEVICES may be set later. ``named``: called whenever torch reads it, as it does once a group names this
    backend."""

    def __init__(self, named: Callable[[], None] = lambda: None) -> None:
        self._named = named

    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            self._named()
        return served_devices()[index]

    def __len__(self) -> int:
        return len(served_devices())
