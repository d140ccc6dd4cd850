"""transformers' Trainer, its tensor parallelism, and accelerate."""

import logging
import tempfile

import cases
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import InitProcessGroupKwargs
from cases import case
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig


def forget():
    """accelerate's state is the process's."""
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    GradientState._reset_state()


def tiny():
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def sentences(number):
    tokens = torch.randint(0, 32, (number, 5), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trained(**options):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=cases.STEPS, per_device_train_batch_size=2, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_steps=1000, **options,
        )  # fmt: skip
        trainer = Trainer(tiny(), arguments, train_dataset=sentences(12))
        trainer.train()
        assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    return trainer.model


@case
def trainer(backend):
    forget()
    return trained(ddp_backend=backend)


@case
def trainer_after_init(backend):
    forget()
    cases.init(backend)
    return trained()


def accelerated(*handlers):
    accelerator = Accelerator(cpu=True, kwargs_handlers=list(handlers))
    net = cases.model()
    loader = torch.utils.data.DataLoader(cases.rows(24), batch_size=4)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1), loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(cases.loss(net(x), y))
        optimizer.step()
    assert isinstance(net, torch.nn.parallel.DistributedDataParallel)
    gathered = accelerator.gather(torch.tensor([float(accelerator.process_index)]))
    assert gathered.tolist() == [0.0, 1.0]
    return accelerator.unwrap_model(net)


@case
def accelerate(backend):
    forget()
    return accelerated(InitProcessGroupKwargs(backend=backend))


@case
def accelerate_after_init(backend):
    forget()
    cases.init(backend)
    return accelerated()


@case
def tensor_parallel(backend):
    split = DistributedConfig(tp_plan="auto")
    with tempfile.TemporaryDirectory() as own:
        if cases.rank() == 0:
            tiny().save_pretrained(own)
            cases.tell(f"folder of {backend}", own)
        folder = cases.told(f"folder of {backend}")
        if backend != "gloo":
            cases.init(backend)  # else transformers makes the group: it has no option for the name
        net = LlamaForCausalLM.from_pretrained(folder, distributed_config=split)
        dist.barrier()  # until both have read the folder
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for sentence in sentences(cases.STEPS):
        optimizer.zero_grad()
        row = sentence["input_ids"][None]
        net(input_ids=row, labels=row).loss.backward()
        optimizer.step()
    assert any(hasattr(p, "to_local") and p.to_local().shape != p.shape for p in net.parameters())
    return net


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cases.main()
