"""vLLM's worker on a CPU, as ``python scripts/bench vllm`` has it: it also tells which backends its groups have, and
what tensor parallelism's sum takes by itself; with vLLM's own kernel for that sum, or without.

vLLM imports it by name in each process that it starts for a rank."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):
    def groups(self) -> list[str]:
        """The backends of this process's groups, by what they say themselves."""
        return sorted({group.name() for group in dist.distributed_c10d._world.pg_map})

    def time_sum(self, rows: int, times: int) -> float:
        """Seconds that the sum of so many rows of hidden states takes, called as the model calls it: the median."""
        group = get_tp_group()
        hidden = self.model_config.get_hidden_size()
        states = torch.zeros(rows, hidden, dtype=self.model_config.dtype)
        took = []
        for _ in range(times):
            begun = time.perf_counter()
            group.all_reduce(states)
            took.append(time.perf_counter() - begun)
        return statistics.median(took)


class WithoutKernel(Worker):
    """What vLLM does where ranks are on several hosts, it does on one, too: it leaves the sums to torch.distributed."""

    def init_device(self) -> None:
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda communicator: False
        super().init_device()
