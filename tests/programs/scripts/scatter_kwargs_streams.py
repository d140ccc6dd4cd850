#!/usr/bin/env python
"""Article 000: DDP's forward, scatter_kwargs, and Scatter with copy streams.

Differs from the article, which quotes PyTorch's source and has no main program:
- the quoted functions are used here as they stand, with the imports that they
  need, to_kwargs written out, and the forward put in a small wrapper class;
- with fewer than two GPUs, Scatter.apply cannot run; what needs no GPU does:
  scatter_kwargs on values that are not tensors, and forward without
  device_ids, with the gradients averaged over two processes by the backend
  under test;
- results go to JSON lines.
"""
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.parallel.comm as comm
from torch._utils import _get_device_index
from torch.autograd import Function
from torch.multiprocessing import Process
from torch.nn.parallel import parallel_apply, replicate
from torch.nn.parallel._functions import Gather, _get_stream
from torch.nn.parallel.scatter_gather import gather

BACKEND = os.environ.get('C10D_TEST_BACKEND', 'custom')


def is_namedtuple(obj):
    return isinstance(obj, tuple) and hasattr(obj, '_fields')


class Scatter(Function):

    @staticmethod
    def forward(ctx, target_gpus, chunk_sizes, dim, input):
        target_gpus = [_get_device_index(x, True) for x in target_gpus]
        ctx.dim = dim
        ctx.input_device = input.get_device() if input.device.type != "cpu" else -1
        streams = None
        if torch.cuda.is_available() and ctx.input_device == -1:
            # Perform CPU to GPU copies in a background stream
            # (today's _get_stream takes a device, not an index)
            streams = [_get_stream(torch.device('cuda', device)) for device in target_gpus]
        outputs = comm.scatter(input, target_gpus, chunk_sizes, ctx.dim, streams)
        # Synchronize with the copy stream
        if streams is not None:
            for i, output in enumerate(outputs):
                with torch.cuda.device(target_gpus[i]):
                    main_stream = torch.cuda.current_stream()
                    main_stream.wait_stream(streams[i])
                    output.record_stream(main_stream)
        return outputs

    @staticmethod
    def backward(ctx, *grad_output):
        return None, None, None, Gather.apply(ctx.input_device, ctx.dim, *grad_output)


def scatter(inputs, target_gpus, dim=0):
    r"""
    Slices tensors into approximately equal chunks and
    distributes them across given GPUs. Duplicates
    references to objects that are not tensors.
    """
    def scatter_map(obj):
        if isinstance(obj, torch.Tensor):
            return Scatter.apply(target_gpus, None, dim, obj)
        if is_namedtuple(obj):
            return [type(obj)(*args) for args in zip(*map(scatter_map, obj))]
        if isinstance(obj, tuple) and len(obj) > 0:
            return list(zip(*map(scatter_map, obj)))
        if isinstance(obj, list) and len(obj) > 0:
            return [list(i) for i in zip(*map(scatter_map, obj))]
        if isinstance(obj, dict) and len(obj) > 0:
            return [type(obj)(i) for i in zip(*map(scatter_map, obj.items()))]
        return [obj for targets in target_gpus]

    # After scatter_map is called, a scatter_map cell will exist. This cell
    # has a reference to the actual function scatter_map, which has references
    # to a closure that has a reference to the scatter_map cell (because the
    # fn is recursive). To avoid this reference cycle, we set the function to
    # None, clearing the cell
    try:
        res = scatter_map(inputs)
    finally:
        scatter_map = None
    return res


def scatter_kwargs(inputs, kwargs, target_gpus, dim=0):
    r"""Scatter with support for kwargs dictionary"""
    inputs = scatter(inputs, target_gpus, dim) if inputs else []
    kwargs = scatter(kwargs, target_gpus, dim) if kwargs else []
    if len(inputs) < len(kwargs):
        inputs.extend([() for _ in range(len(kwargs) - len(inputs))])
    elif len(kwargs) < len(inputs):
        kwargs.extend([{} for _ in range(len(inputs) - len(kwargs))])
    inputs = tuple(inputs)
    kwargs = tuple(kwargs)
    return inputs, kwargs


class ArticleDDP(nn.Module):
    """ Only the quoted forward: gradients are averaged by the caller. """

    def __init__(self, module, device_ids=None):
        super().__init__()
        self.module = module
        self.device_ids = device_ids
        self.output_device = device_ids[0] if device_ids else None
        self.dim = 0

    def to_kwargs(self, inputs, kwargs, device_id):
        return scatter_kwargs(inputs, kwargs, [device_id], dim=self.dim)

    def scatter(self, inputs, kwargs, device_ids):
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(self, replicas, inputs, kwargs):
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[:len(replicas)])

    def gather(self, outputs, output_device):
        return gather(outputs, output_device, dim=self.dim)

    def forward(self, *inputs, **kwargs):
        if self.device_ids:
            # The article's version of DDP kept copies made at construction.
            self._module_copies = replicate(self.module, self.device_ids)
            if len(self.device_ids) == 1:
                inputs, kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
                output = self.module(*inputs[0], **kwargs[0])
            else:
                inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
                outputs = self.parallel_apply(self._module_copies[:len(inputs)], inputs, kwargs)
                output = self.gather(outputs, self.output_device)
        else:
            output = self.module(*inputs, **kwargs)
        return output


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    def forward(self, x, factor=1.0):
        return factor * (x @ self.weight)


def run(rank, size):
    x = torch.arange(6.0).view(3, 2) + rank
    model = ArticleDDP(Scaled())
    output = model(x, factor=2.0)
    output.sum().backward()
    grad = model.module.weight.grad
    dist.all_reduce(grad)
    grad /= size
    print(json.dumps({'rank': rank, 'output': output.tolist(), 'grad': grad.tolist()}))


def init_process(rank, size, fn, backend=BACKEND):
    os.environ['MASTER_ADDR'] = '127.0.0.1'
    os.environ.setdefault('MASTER_PORT', '29500')
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


def on_gpus():
    x = torch.arange(30.0).view(15, 2).requires_grad_()
    inputs, kwargs = scatter_kwargs((x,), {'factor': 2.0}, [0, 1])
    model = ArticleDDP(Scaled().cuda(0), device_ids=[0, 1])
    output = model(x, factor=2.0)
    output.sum().backward()
    print(json.dumps({
        'shapes': [list(i[0].shape) for i in inputs],
        'devices': [str(i[0].device) for i in inputs],
        'kwargs': list(kwargs),
        'output_matches': torch.equal(output.cpu(), 2.0 * (x @ Scaled().weight)),
        'x_grad_device': str(x.grad.device),
        'x_grad': x.grad[0].tolist(),
    }))


if __name__ == "__main__":
    nested = scatter_kwargs(('a', [1, 2]), {'k': {'n': 3}}, [0, 1])
    more_kwargs = scatter_kwargs((), {'k': 1}, [0, 1])
    more_inputs = scatter_kwargs((7,), {}, [0, 1])
    # Flushed, as what is still in the buffer at a fork is printed by the child too.
    print(json.dumps({'nested': nested, 'more_kwargs': more_kwargs, 'more_inputs': more_inputs}), flush=True)

    if torch.cuda.device_count() >= 2:
        on_gpus()

    size = 2
    processes = []
    for rank in range(size):
        p = Process(target=init_process, args=(rank, size, run))
        p.start()
        processes.append(p)

    for p in processes:
        p.join()
