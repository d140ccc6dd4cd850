"""ignite: Parallel, and auto_model after a group made beforehand."""

import cases
import ignite.distributed as idist
import torch
from cases import case
from ignite.engine import Engine


def trained(_=None):
    net = idist.auto_model(cases.model())
    if not isinstance(net, torch.nn.parallel.DistributedDataParallel):
        raise RuntimeError(f"auto_model gave {type(net).__name__}: no gradient is shared")
    optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), lr=0.1))

    def step(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        value = cases.loss(net(x), y)
        value.backward()
        optimizer.step()
        return idist.all_reduce(value.detach())

    Engine(step).run(idist.auto_dataloader(cases.rows(24), batch_size=8, shuffle=False), max_epochs=1)
    return net


@case
def parallel(backend):
    result = []
    with idist.Parallel(backend=backend) as started:
        started.run(lambda _: result.append(trained().state_dict()))
    return result[0]


@case
def auto_model_after_init(backend):
    cases.init(backend)
    return trained()


if __name__ == "__main__":
    cases.main()
