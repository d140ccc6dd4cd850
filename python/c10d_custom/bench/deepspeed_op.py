"""DeepSpeed's all_reduce in shared memory, as its users call it: deepspeed.comm.inference_all_reduce.

It is of all ranks of a job on one host, and waits for them without end and without leaving its core. DeepSpeed compiles
it at first use.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from .case import Reference, Unavailable, name_of
from .ranks import first_said

if TYPE_CHECKING:
    from .case import Case
    from .operations import Buffers


_LEVELS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 2}  # of the processor, as DeepSpeed counts them
_MOST = 1 << 31  # bytes: it counts them in an int


class DeepSpeedOp(Reference):
    def __init__(self, hosts: int) -> None:
        if hosts > 1:
            raise Unavailable("DeepSpeed's op is for the ranks of one host")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            # Its first call in a rank waits, without end, for one of each other.
            if why := first_said(_why_not()):
                raise Unavailable(why)
            self.function, self.level = _started()

    def barrier(self) -> None:
        dist.barrier()

    def bind(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        if case.operation != "all_reduce" or case.redop != "SUM" or case.asynchronous:
            raise Unavailable("DeepSpeed's op is a synchronous all_reduce that sums")
        if case.dtype not in _LEVELS or case.nbytes >= _MOST:
            raise Unavailable(f"DeepSpeed's op takes no {name_of(case.dtype)} of {case.nbytes} bytes")
        if self.level < _LEVELS[case.dtype]:  # then DeepSpeed calls torch.distributed's, which is ours
            raise Unavailable(f"DeepSpeed has no op for {name_of(case.dtype)} on this processor")
        return partial(self.function, buffers.target)


def _why_not() -> str | None:
    """Why the op cannot be had here; None if it is compiled and loaded."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    try:
        from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # type: ignore[import-not-found]

        ShareMemCommBuilder().load()
    except Exception as error:  # a compiler's failure has many types
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"DeepSpeed's op needs DeepSpeed, ninja and a C++ compiler (pip install deepspeed ninja): {first}"
    return None


@contextlib.contextmanager
def _job() -> Iterator[str]:
    """Within it DeepSpeed takes all ranks for ranks of one host, and names its memory by an address and a port, which
    are this run's alone. Gives what the names begin with."""
    mine: list[Any] = [f"{os.getpid()}-{os.urandom(4).hex()}"]
    dist.broadcast_object_list(mine, src=0)
    new = {"LOCAL_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "bench", "MASTER_PORT": mine[0]}
    with patch.dict(os.environ, new):
        yield f"deepspeed_allreduce_buffer_{os.getuid()}_bench_{mine[0]}"


def _started() -> tuple[Callable[..., object], int]:
    """The function that users call, and the level of this processor. Collective over the default group."""
    import deepspeed.comm  # type: ignore[import-not-found]

    with _job() as name:
        deepspeed.comm.init_distributed(dist_backend="gloo")  # only looks at the group there is
        dist.barrier()  # all have opened the memory of all
        with contextlib.suppress(OSError):  # DeepSpeed leaves it behind
            os.unlink(f"/dev/shm/{name}_{dist.get_rank()}")
    backend = deepspeed.comm.comm.cdb
    return deepspeed.comm.inference_all_reduce, getattr(backend, "shm_vector_kernel_level", 2)
