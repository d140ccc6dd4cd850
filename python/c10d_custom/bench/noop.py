"""A ProcessGroup that does nothing, at once: what a call through c10d costs before any backend gets to work."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

NAME = "noop"


class _Nothing(dist.Work):
    def __init__(self) -> None:
        super().__init__()
        self.tensors: Any = []  # of the last call

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.tensors)
        return future


class NoopProcessGroup(dist.ProcessGroup):
    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name, self._nothing = name, _Nothing()

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return ""

    def setGroupDesc(self, desc: str) -> None:
        pass

    def _done(self, *args: Any, **options: Any) -> dist.Work:
        return self._nothing

    def allreduce(self, *args: Any, **options: Any) -> dist.Work:
        self._nothing.tensors = args[0]
        return self._nothing

    def allgather(self, *args: Any, **options: Any) -> dist.Work:
        """As if all ranks had this one's: DDP compares them before it begins."""
        for parts, tensor in zip(args[0], args[1]):
            for part in parts:
                part.copy_(tensor)
        return self._nothing

    # torch's names, those before 2.13 among them.
    broadcast = reduce = reduce_scatter = alltoall = gather = scatter = barrier = _done
    all_gather_single = reduce_scatter_single = all_to_all_single = _done
    _allgather_base = _reduce_scatter_base = alltoall_base = _done
    send = recv = _done


def register() -> None:
    """Makes it a backend of torch.distributed's, "noop"; again does nothing."""
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: Any) -> NoopProcessGroup:
    return NoopProcessGroup(options.group_rank, options.group_size, options.group_id)
