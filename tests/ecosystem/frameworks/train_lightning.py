"""Lightning's Trainer and Fabric."""

import logging
import warnings

import cases
import lightning
import torch
from cases import case
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Module(lightning.LightningModule):
    def __init__(self, sharded=False):
        super().__init__()
        self.net, self.sharded = cases.model(), sharded

    def configure_model(self):
        if self.sharded and not hasattr(self.net, "unshard"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        x, y = batch
        return cases.loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(strategy, **options):
    torch.manual_seed(0)
    module = Module(**options)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=cases.STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(cases.rows(24), batch_size=4))
    assert trainer.world_size == 2 and trainer.global_step == cases.STEPS
    return module


@case
def ddp(backend):
    return fit(DDPStrategy(process_group_backend=backend))


@case
def model_parallel(backend):
    return fit(
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend=backend), sharded=True
    )


@case
def fabric(backend):
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=FabricDDP(process_group_backend=backend))
    fabric.launch()
    net = cases.model()
    net, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    for x, y in fabric.setup_dataloaders(torch.utils.data.DataLoader(cases.rows(24), batch_size=4)):
        optimizer.zero_grad()
        fabric.backward(cases.loss(net(x), y))
        optimizer.step()
    assert fabric.all_gather(torch.tensor(float(fabric.global_rank))).tolist() == [0.0, 1.0]
    return net


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    cases.main()
