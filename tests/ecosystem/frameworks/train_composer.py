"""Composer's Trainer. It knows no backend but its device's, gloo on a CPU.

torchvision on PyPI is built for CUDA: beside a torch without, its own operators are missing, and it can't be imported
unless something declares the two that it gives shapes for. Nothing here calls them."""

import os

import cases
import torch
from cases import case

operators = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

os.environ |= {"NODE_RANK": "0"}  # torchrun calls it GROUP_RANK
import composer  # noqa: E402


class Model(composer.ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = cases.model()

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return cases.loss(outputs, batch[1])


def trained():
    model, rows = Model(), cases.rows(24)
    trainer = composer.Trainer(
        model=model, optimizers=torch.optim.AdamW(model.parameters(), lr=0.1), device="cpu", seed=0,
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=4, sampler=composer.utils.dist.get_sampler(rows)),
        max_duration=f"{cases.STEPS}ba", progress_bar=False, dist_timeout=60,
    )  # fmt: skip
    trainer.fit()
    if not isinstance(trainer.state.model, torch.nn.parallel.DistributedDataParallel):
        raise RuntimeError(f"Trainer made {type(trainer.state.model).__name__}: no gradient is shared")
    trainer.close()
    return model


@case
def trainer(backend):
    return trained()


@case
def trainer_after_init(backend):
    cases.init(backend)
    return trained()


if __name__ == "__main__":
    cases.main()
