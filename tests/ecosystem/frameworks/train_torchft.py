"""torchft: two replica groups of one rank each, over our ready-made group, and one that goes away."""

import socket
from datetime import timedelta

import cases
import torch
import torch.distributed as dist
from cases import case
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

LIMIT = timedelta(seconds=20)


def group(backend):
    if backend == "gloo":
        return ProcessGroupGloo(timeout=LIMIT)
    from c10d_custom.torchft import ProcessGroupCustom

    return ProcessGroupCustom(timeout=LIMIT)


def replica(backend, name, leaves_after=None, steps=cases.STEPS):
    """The weights after the replica's last committed step. Rank 1 leaves after so many, if it does, in the middle of
    a step: rank 0 finds that step failed, and does it again alone."""
    rank = cases.rank()
    if rank == 0:
        house = LighthouseServer(bind="[::]:0", min_replicas=1 if leaves_after else 2, join_timeout_ms=2000)
        cases.tell(f"{name}/lighthouse", house.address())
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    wrapped = group(backend)
    net = cases.model()
    manager = Manager(
        pg=wrapped, load_state_dict=net.load_state_dict, state_dict=net.state_dict, min_replica_size=1, timeout=LIMIT,
        rank=0, world_size=1, store_addr="localhost", store_port=store.port, hostname=socket.gethostname(),
        lighthouse_addr=cases.told(f"{name}/lighthouse"), replica_id=f"replica_{rank}", use_async_quorum=False,
        init_sync=False,
    )  # fmt: skip
    wait_for_both(name)
    # Its DDP does not get over a failed step (an assertion of its own, with gloo, too).
    ddp = net if leaves_after else DistributedDataParallel(manager, net)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(net.parameters(), lr=0.1))
    failed = 0
    data = cases.batches(rank, steps)
    while (step := manager.current_step()) < steps:
        optimizer.zero_grad()  # meets the other replicas
        cases.made_of(wrapped.parent.name())
        if step == leaves_after and rank == 1:
            break
        x, y = data[step]
        cases.loss(ddp(x), y).backward()
        for p in net.parameters() if ddp is net else ():
            manager.allreduce(p.grad).wait()
        optimizer.step()
        failed += manager.current_step() == step
    manager.shutdown(wait=False)
    wrapped.abort(errored=False)
    assert failed == (1 if leaves_after and rank == 0 else 0)
    return net


def wait_for_both(name):
    cases.tell(f"{name}/{cases.rank()}", "")
    for rank in range(2):
        cases.told(f"{name}/{rank}")


@case
def managed(backend):
    return replica(backend, "managed")


@case
def replica_lost(backend):
    return replica(backend, "replica_lost", leaves_after=1)


if __name__ == "__main__":
    cases.main()
