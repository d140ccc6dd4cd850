#!/usr/bin/env python
"""Article 002: DataParallel taken apart into replicate, scatter, apply, gather.

Differs from the article: `import ipdb` (unused) is left out, and the last
print shows the size that the article's listing shows. With fewer than two
GPUs, device_ids is empty, which is the function's own first branch: the
module runs as it is, on the CPU. No process group is involved.
"""
import torch
import torch.nn as nn


class DataParallelModel(nn.Module):

    def __init__(self):
        super().__init__()
        self.block1 = nn.Linear(10, 20)

    def forward(self, x):
        x = self.block1(x)
        return x


def data_parallel(module, input, device_ids, output_device=None):
    if not device_ids:
        return module(input)

    if output_device is None:
        output_device = device_ids[0]

    replicas = nn.parallel.replicate(module, device_ids)
    print(f"replicas:{replicas}")
    inputs = nn.parallel.scatter(input, device_ids)
    print(f"inputs:{type(inputs)}")
    for i in range(len(inputs)):
        print(f"input {i}:{inputs[i].shape}")
    replicas = replicas[:len(inputs)]
    outputs = nn.parallel.parallel_apply(replicas, inputs)
    print(f"outputs:{type(outputs)}")
    for i in range(len(outputs)):
        print(f"output {i}:{outputs[i].shape}")
    result = nn.parallel.gather(outputs, output_device)
    return result


model = DataParallelModel()
x = torch.rand(16, 10)
if torch.cuda.device_count() >= 2:
    result = data_parallel(model.cuda(), x.cuda(), [0, 1])
else:
    result = data_parallel(model, x, [])
print(f"result:{result.shape}")
