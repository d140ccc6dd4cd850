"""torchrec: pooled embeddings of batches that differ in size, and sharded tables."""

import cases
import torch
import torch.distributed as dist
import torchrec
from cases import case
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import comm_ops
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology


@case
def variable_batch(backend):
    """Rank r has r + 2 examples of a feature on each rank; with synchronous collectives, forward and backward."""
    cases.init(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = [2 + r for r in range(size)]
    with comm_ops.torchrec_use_sync_collectives():
        torch.manual_seed(rank)
        sent = torch.randn(sum(batch) * 4, requires_grad=True)
        got = comm_ops.variable_batch_alltoall_pooled(
            sent,
            batch_size_per_rank_per_feature=[[b] for b in batch],
            batch_size_per_feature_pre_a2a=[batch[rank]] * size,
            emb_dim_per_rank_per_feature=[[4]] * size,
            group=dist.group.WORLD,
        ).wait()
        (got * torch.arange(1.0, got.numel() + 1)).sum().backward()
    return {"got": got, "gradient": sent.grad}


@case
def sharded_tables(backend):
    """One table on each rank: all_to_all of ids, of pooled rows, and of their gradients; SGD within backward."""
    cases.init(backend)
    torch.manual_seed(0)
    device = torch.device("cpu")
    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=8, num_embeddings=16, feature_names=[f"f{i}"])
        for i in range(2)
    ]
    module = torchrec.EmbeddingBagCollection(tables=tables, device=device)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    limits = {f"t{i}": ParameterConstraints(sharding_types=["table_wise"]) for i in range(2)}
    planner = EmbeddingShardingPlanner(topology=Topology(2, "cpu"), constraints=limits)
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    net = DistributedModelParallel(module, device=device, plan=plan, sharders=sharders)
    outputs = {}
    for step in range(cases.STEPS):
        values = torch.randint(0, 16, (8,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        features = torchrec.KeyedJaggedTensor(["f0", "f1"], values, lengths=torch.ones(8, dtype=torch.int64))
        pooled = net(features).values()
        (pooled * torch.arange(1.0, pooled.numel() + 1).view_as(pooled) * 0.01).sum().backward()
        outputs[f"{step}"] = pooled
    assert not outputs["0"].equal(outputs["1"])
    return outputs


if __name__ == "__main__":
    cases.main()
