"""torch's own ways to train: DDP, FSDP, tensor parallelism, pipelining, the ZeRO optimizer, checkpoints that a
background process writes."""

import os
import tempfile
from pathlib import Path

import cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import case
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def trained(backend, wrap, optimizer=torch.optim.AdamW):
    cases.init(backend)
    net = wrap(cases.model())
    return cases.train(net, optimizer(net.parameters(), lr=0.1), dist.get_rank())


@case
def ddp(backend):
    return trained(backend, DistributedDataParallel)


@case
def fsdp_1(backend):
    return trained(backend, lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")))


@case
def fsdp_2(backend):
    return trained(backend, fully_shard)


@case
def zero_optimizer(backend):
    def sharded(parameters, lr):
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=lr)

    return trained(backend, DistributedDataParallel, sharded)


@case
def tensor_parallel(backend):
    cases.init(backend)
    mesh = dist.init_device_mesh("cpu", (2,))
    net = parallelize_module(cases.model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return cases.train(net, torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False), 0)


@case
def pipeline(backend):
    cases.init(backend)
    rank, net = dist.get_rank(), cases.model()
    part = net[:2] if rank == 0 else net[2:]
    schedule = ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), 2, loss_fn=cases.loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
    for x, y in cases.batches(0):
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()
    return part


class TellingWriter(FileSystemWriter):
    """Writes beside the checkpoint what the groups of the process that writes it are."""

    def write_data(self, plan, planner):
        told = Path(self.path, f"written-by-{os.environ['RANK']}")
        told.write_text(" ".join([str(os.getpid()), *cases.group_names()]))
        return super().write_data(plan, planner)


@case
def checkpoint_by_a_process(backend):
    """The background processes make a group of their own, always as "gloo"."""
    cases.init(backend)
    rank = dist.get_rank()
    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folder, 0)
    net = fully_shard(cases.model())
    cases.train(net, torch.optim.AdamW(net.parameters(), lr=0.1), rank)
    saved = dcp.async_save(
        net.state_dict(), storage_writer=TellingWriter(folder[0]), async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    (saved if hasattr(saved, "result") else saved.upload_completion).result()
    process, *backends = Path(folder[0], f"written-by-{rank}").read_text().split()
    assert int(process) != os.getpid() and backends
    cases.made_of(*backends)
    again = fully_shard(cases.model(seed=1))
    state = again.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    assert all(torch.equal(cases.local(state[name]), cases.local(p)) for name, p in net.state_dict().items())
    return state


if __name__ == "__main__":
    cases.main()
