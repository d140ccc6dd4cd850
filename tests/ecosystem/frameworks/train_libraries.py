"""Libraries with a loss, a metric or an optimizer that communicates."""

import importlib.util
from pathlib import Path

import cases
import torch
import torch.distributed as dist
from cases import case
from torch.nn.parallel import DistributedDataParallel


def loss_of_open_clip():
    """Without the package's face, which imports torchvision."""
    spec = importlib.util.find_spec("open_clip")
    file = Path(spec.submodule_search_locations[0], "loss.py")
    spec = importlib.util.spec_from_file_location("open_clip_loss", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contrastive(backend, **options):
    cases.init(backend)
    rank = dist.get_rank()
    net = cases.model()
    loss = loss_of_open_clip().ClipLoss(rank=rank, world_size=2, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for x, y in cases.batches(rank):
        optimizer.zero_grad()
        features = torch.nn.functional.normalize(net(x), dim=-1)
        loss(features, torch.nn.functional.normalize(y, dim=-1), logit_scale=torch.tensor(10.0)).backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    return net


@case
def open_clip(backend):
    return contrastive(backend)


@case
def open_clip_with_grad(backend):
    return contrastive(backend, local_loss=True, gather_with_grad=True)


@case
def metrics(backend):
    import torchmetrics

    cases.init(backend)
    x, y = cases.batches(dist.get_rank(), steps=1)[0]
    metric = torchmetrics.MeanSquaredError()
    seen = torchmetrics.CatMetric()
    metric.update(x[:, :4].contiguous(), y)
    seen.update(y[: 2 + dist.get_rank(), 0])  # ranks have unequal numbers of values
    return {"mean": metric.compute(), "all": seen.compute()}


@case
def metric_learning(backend):
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    cases.init(backend)
    rank = dist.get_rank()
    net = DistributedDataParallel(cases.model())
    loss = DistributedLossWrapper(losses.ContrastiveLoss())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for x, _ in cases.batches(rank):
        optimizer.zero_grad()
        loss(net(x), torch.tensor([0, 0, 1, 1])).backward()
        optimizer.step()
    return net.state_dict()


@case
def fairscale_oss(backend):
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    cases.init(backend)
    net = cases.model()
    optimizer = OSS(net.parameters(), optim=torch.optim.SGD, lr=0.1, momentum=0.9)
    return cases.train(ShardedDataParallel(net, optimizer), optimizer, dist.get_rank())


if __name__ == "__main__":
    cases.main(one_group=True)  # torch.distributed.nn keeps the one that it was imported with
