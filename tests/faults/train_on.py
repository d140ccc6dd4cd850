"""DDP on 4 ranks; one kills itself in the middle of a backward pass; the others shrink the group and train on.

python tests/faults/train_on.py VICTIM         (prints JSON)
"""

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
from training import bits, loss_of, new_model, optimizer_of, reference, state

import c10d_custom

RANKS, STEPS, FATAL_STEP = 4, 60, 17


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
        except RuntimeError as error:  # out of a backward pass every error comes as one
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


def main():
    victim = int(sys.argv[1])
    torch.set_num_threads(1)
    ranks = ForkedRanks(RANKS, train, serve_store(), victim)
    stuck = ranks.finish()
    said = [s for r, s in enumerate(ranks.said) if r != victim]
    print(
        json.dumps(
            {
                "stuck": stuck,
                "codes": ranks.codes,
                "said": said,
                "expected": [
                    reference(STEPS, lambda step, s=s: RANKS - (step >= s.get("resumed_at", STEPS))) for s in said
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
