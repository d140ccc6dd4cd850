"""What the scripts of this folder share: each is a rank of small trainings in one framework, one after the other.

    torchrun ... train_NAME.py FOLDER BACKEND:CASE...

A *case* is a training: a function of the name to ask for ("gloo" or "custom") that returns the weights. What became of
each goes into FOLDER/rank-R.json, under BACKEND:CASE: a digest of the weights' bytes or the error raised, and the names
of the backends that its groups had. The pytest side (test_frameworks.py) compares."""

import functools
import hashlib
import json
import os
import socket
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

STEPS = 3
_cases = {}
_made = set()  # backends of this case's groups

_destroy = dist.destroy_process_group


@functools.cache
def _launchers_store():
    """First asked for by meet_elsewhere, before MASTER_PORT is another. Processes that a case starts do without."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def group_names():
    """What this process's groups say they are."""
    return {group.name() for group in dist.distributed_c10d._world.pg_map} if dist.is_initialized() else set()


def _note():
    _made.update(group_names())


def _destroy_noted(*args, **kwargs):
    _note()
    return _destroy(*args, **kwargs)


dist.destroy_process_group = _destroy_noted  # frameworks that end their groups themselves


def case(function):
    _cases[function.__name__] = function
    return function


def init(backend):
    """As a user's script does before it hands over to the framework."""
    if not dist.is_initialized():  # by the case before, where all have one group
        dist.init_process_group(backend, timeout=timedelta(seconds=60))


def rank():
    return int(os.environ["RANK"])


def tell(key, value):
    """The other rank, by the launcher's store."""
    _launchers_store().set(key, value)


def told(key):
    return _launchers_store().get(key).decode()


def made_of(*names):
    """Backends of groups that this process does not know of and that take part in this case."""
    _made.update(names)


def model(seed=0, width=8):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))


def rows(number, seed=0):
    """Inputs and labels, the same on every rank: samplers share them out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 6, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randn(number, 4, generator=generator))


def batches(rank, steps=STEPS):
    """A rank's own batches."""
    return [rows(4, seed=100 * rank + step).tensors for step in range(steps)]


def loss(output, label):
    return torch.nn.functional.mse_loss(output, label)


def train(net, optimizer, rank):
    for x, y in batches(rank):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net.state_dict()


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def digest(weights):
    """Of names, dtypes, shapes and bytes; of this rank's part, where a tensor is spread over ranks."""
    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict()
    if not isinstance(weights, dict):
        weights = dict(enumerate(weights))
    assert weights
    made = hashlib.sha256()
    for name, value in weights.items():
        value = local(value.detach()).cpu().contiguous()
        assert value.isfinite().all(), f"{name}: {value}"
        made.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        made.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def meet_elsewhere(name):
    """A store of its own for each case: gloo would find the addresses of its last group in the launcher's."""
    if rank() == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            tell(name, str(free.getsockname()[1]))
    os.environ["MASTER_PORT"] = told(name)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def one(name, keep_group):
    backend, _, function = name.partition(":")
    _made.clear()
    if not dist.is_initialized():
        meet_elsewhere(name)
    try:
        told = {"digest": digest(_cases[function](backend))}
    except Exception as error:
        told = {"raised": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
    _note()
    told["groups"] = sorted(_made)
    if dist.is_initialized() and not keep_group:
        dist.destroy_process_group()
    return told


def main(one_group=False):
    folder, *chosen = sys.argv[1:]
    torch.set_num_threads(1)
    outcomes = {name: one(name, one_group) for name in chosen}
    if dist.is_initialized():
        dist.destroy_process_group()
    with open(f"{folder}/rank-{rank()}.json", "w") as file:
        json.dump(outcomes, file)
