"""DeepSpeed: ZeRO 1 to 3, bf16, and its pipeline."""

import logging
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import cases
import deepspeed
import torch
from cases import case
from deepspeed.pipe import PipelineModule

# An all_reduce of its own for inference, that it compiles when it starts (a minute, and with a compiler only).
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def configuration(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **more,
    }


def zero(backend, stage, dtype=torch.float32, **more):
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    net = cases.model()
    engine, _, _, _ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.1), config=configuration(stage, **more)
    )
    for x, y in cases.batches(engine.global_rank):
        engine.backward(cases.loss(engine(x.to(dtype)), y.to(dtype)))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=stage == 3):
        weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    engine.destroy()
    return weights


@case
def zero_1(backend):
    return zero(backend, 1)


@case
def zero_2(backend):
    return zero(backend, 2)


@case
def zero_2_bf16(backend):
    return zero(backend, 2, torch.bfloat16, bf16={"enabled": True})


@case
def zero_3(backend):
    return zero(backend, 3)


@case
def pipeline(backend):
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    net = PipelineModule(layers=list(cases.model()), num_stages=2, loss_fn=cases.loss, partition_method="uniform")
    config = configuration(0) | {"gradient_accumulation_steps": 2}
    engine, _, _, _ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.1), config=config
    )
    micro_batches = iter(cases.batches(0, steps=2 * cases.STEPS))
    for _ in range(cases.STEPS):
        engine.train_batch(micro_batches)
    return {name: p.detach() for name, p in net.named_parameters()}


if __name__ == "__main__":
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    cases.main(one_group=True)  # DeepSpeed keeps what it has made of a group for as long as it lives
