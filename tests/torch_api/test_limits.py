"""What cannot be had, and why. A torch in which one of these no longer holds fails here."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ecosystem.spawn import run


class _Done(dist.Work):
    def __init__(self, tensors):
        super().__init__()
        self._future = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout=None):
        return True

    def get_future(self):
        return self._future


class _AlreadyEqual(dist.ProcessGroup):
    """Not ours: the least that a group written in Python can be. All ranks have the same gradients, so nothing
    moves."""

    def __init__(self, rank, size):
        super().__init__(rank, size)

    def getBackendName(self):
        return "equal"

    def allreduce(self, tensors, opts=None):
        return _Done(tensors)

    broadcast = allreduce

    def allgather(self, outputs, inputs, opts=None):
        for output in outputs[0]:
            output.copy_(inputs[0])
        return _Done(outputs)


def fp16_hook(rank, size):
    for group in (dist.group.WORLD, _AlreadyEqual(rank, size)):
        model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group, init_sync=False)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        model(torch.ones(1, 3)).sum().backward()
        model = DistributedDataParallel(torch.nn.Linear(3, 1), process_group=group, init_sync=False)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        with pytest.raises(RuntimeError, match=r"isTensorList\(\)"):
            model(torch.ones(1, 3)).sum().backward()


def test_the_built_in_fp16_hook_takes_no_future_of_python_s():
    """What a future made in Python holds is a Python object to C++, and the hook asserts that it is a list of tensors.
    The hook of the same name in torch.distributed.algorithms, in Python, works (ecosystem/test_ddp_hooks.py)."""
    run(fp16_hook, 2)
