"""What runs inside the ranks: groups, buffers and blocks of calls. The parent (session.py) says which and how many."""

import functools
import json
import logging
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from c10d_custom.bench.case import REDUCING, ROOTED, Case
from c10d_custom.bench.operations import OPERATIONS
from c10d_custom.bench.references import Backend
from c10d_custom.c10d import meeting

from ..device import device_of
from .timing import take


@functools.cache
def reference(name):
    """A c10d backend over all ranks; "custom" is the default group. A JSON object: a group of ours under these
    settings."""
    if name.startswith("{"):
        return Backend(_group_under(json.loads(name)))
    if name == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return Backend(dist.group.WORLD if name == "custom" else dist.new_group(backend=name))


def _group_under(settings):
    """A group made while these variables have these values, which it keeps."""
    kept = {variable: os.environ.get(variable) for variable in settings}
    os.environ.update(settings)
    meeting.configuration.cache_clear()
    try:
        return dist.new_group()
    finally:
        for variable, value in kept.items():
            os.environ.pop(variable) if value is None else os.environ.update({variable: value})
        meeting.configuration.cache_clear()


@functools.cache
def case_of(operation, count):
    """``operation``: one of OPERATIONS, or its name and "_async", or "_graph"."""
    name, size = operation.removesuffix("_async").removesuffix("_graph"), dist.get_world_size()
    return Case(
        name,
        OPERATIONS[name].split(count, size),
        torch.float32,
        "SUM" if name in REDUCING else None,
        0 if name in ROOTED else -1,
        operation.endswith("_async"),
        dist.get_rank(),
        size,
    )


@functools.lru_cache(maxsize=1)
def buffers(kind, operation, count):
    """An operation's Buffers, on the device."""
    case, device = case_of(operation, count), device_of(kind)
    made = OPERATIONS[case.operation].make(case)
    source = None if made.source is None else device.put(made.source)
    target = source if made.target is made.source else None if made.target is None else device.put(made.target)
    return replace(made, source=source, target=target)


def call_of(kind, backend, operation, count):
    call = reference(backend).bind(case_of(operation, count), buffers(kind, operation, count))
    if not operation.endswith("_graph") or not device_of(kind).queues:
        return call
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def wrong_elements(kind, backend, operation, count):
    """How many elements of one call's result are not what they must be, on this rank."""
    there = buffers(kind, operation, count)
    there.fill()
    call_of(kind, backend, operation, count)()
    wrong = replace(there, target=None if there.target is None else there.target.cpu()).wrong()
    there.clear()
    return wrong


def block(kind, backend, operation, count, calls):
    """Times of so many calls, or the text of what the backend raised (on every rank alike, or the pool ends)."""
    device = device_of(kind)
    try:
        call = call_of(kind, backend, operation, count)
        call()
        device.synchronize()
        reference(backend).barrier()
        return take(call, device, calls)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


def copy_rate(kind, size, calls=20):
    """Bytes read and written per second by copies on the device, by rank 0 while the others rest."""
    rate, device = None, device_of(kind)
    if dist.get_rank() == 0:
        source, target = device.put(torch.ones(size // 4)), device.put(torch.zeros(size // 4))
        times = take(lambda: target.copy_(source), device, calls)
        rate = 2 * size / times.row
        del source, target
        if device.queues:
            torch.cuda.empty_cache()
    dist.barrier()
    return rate


_heard = []


def listen():
    """Keep what the package logs from here on: how it moves tensors of a GPU, and why so."""
    handler = logging.Handler()
    handler.emit = lambda record: _heard.append(record.getMessage())
    logger = logging.getLogger("c10d_custom")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)


def said():
    return "; ".join(dict.fromkeys(_heard))
