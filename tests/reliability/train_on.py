"""DDP on 4 ranks; one kills itself in the middle of a backward pass; the others shrink the group and train on.

    python tests/reliability/train_on.py VICTIM         (prints JSON)

`reference` is what they must have computed, by one process and without torch.distributed.
"""
import copy
import json
import os
import signal
import sys
from datetime import timedelta

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from forked import ForkedRanks, serve_store, store_at
from torch.nn.parallel import DistributedDataParallel

import c10d_custom

RANKS, STEPS, FATAL_STEP = 4, 60, 17
RATE, MOMENTUM = 0.05, 0.9


def new_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batch(shard, shards, step):
    """The part of a step's data that one of ``shards`` ranks gets."""
    rng = torch.Generator().manual_seed(1000 * step + 10 * shards + shard)
    x = torch.randn(24, 6, generator=rng)
    return x, (x[:, :1] - 0.5 * x[:, 1:2]).tanh()


def loss_of(model, shard, shards, step):
    x, y = batch(shard, shards, step)
    return (model(x) - y).square().mean()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), RATE, MOMENTUM)


def state(model, optimizer):
    """All that a step changes. The momentum of a parameter that has had no step is 0."""
    tensors = [p.data for p in model.parameters()]
    for p in model.parameters():
        momentum = optimizer.state[p].get("momentum_buffer")
        if momentum is None:
            momentum = optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        tensors.append(momentum)
    return tensors


def bits(model):
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex()


# --- what the ranks do

def train(rank, say, port, victim):
    if victim == 0:
        # The store that init_process_group gets lives and dies with rank 0.
        shared = store_at(port, "port")
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            shared.set("port", str(store.port))
        else:
            store = dist.TCPStore("127.0.0.1", int(shared.get("port")), None, False, wait_for_workers=False)
    else:
        store = store_at(port, "train")
    dist.init_process_group("custom", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    model = new_model()
    optimizer = optimizer_of(model)
    if rank == victim:
        model[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL) if step == FATAL_STEP else None)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    step, first = 0, None
    while step < STEPS:
        try:
            loss = loss_of(ddp, dist.get_rank(), dist.get_world_size(), step)
            first = loss.item() if first is None else first
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        except RuntimeError as error:   # out of a backward pass every error comes as one
            c10d_custom.shrink_group()
            # Some may have taken the step before they heard: all go on from one that is furthest.
            steps = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
            dist.all_gather(steps, torch.tensor(step))
            step = int(max(steps))
            for tensor in state(model, optimizer):
                dist.broadcast(tensor, steps.index(max(steps)))
            ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
            say(error=f"{type(error).__name__}: {error}", resumed_at=step)
    say(old=rank, rank=dist.get_rank(), size=dist.get_world_size(), first=first, last=loss.item(), bits=bits(model))
    dist.destroy_process_group()


# --- what it must come to

def reference(lost_at):
    """bits() after all steps, of which the first ``lost_at`` had all ranks. DDP scales each rank's gradient by 1/n; they
    are then added in rank order."""
    model = new_model()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        shards = RANKS if step < lost_at else RANKS - 1
        total = None
        for shard in range(shards):
            one = copy.deepcopy(model)
            loss_of(one, shard, shards, step).backward()
            scaled = [p.grad * (1.0 / shards) for p in one.parameters()]
            total = scaled if total is None else [a + b for a, b in zip(total, scaled)]
        for p, g in zip(model.parameters(), total):
            p.grad = g
        optimizer.step()
    return bits(model)


def main():
    victim = int(sys.argv[1])
    torch.set_num_threads(1)
    ranks = ForkedRanks(RANKS, train, serve_store(), victim)
    stuck = ranks.finish()
    said = [s for r, s in enumerate(ranks.said) if r != victim]
    print(json.dumps({"stuck": stuck, "codes": ranks.codes, "said": said,
                      "expected": [reference(s.get("resumed_at", STEPS)) for s in said]}))


if __name__ == "__main__":
    main()
