"""The programs of the three articles, each in a process of its own, and their numbers."""

import hashlib
import importlib.util
import json
import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from harness import Layout

from .launch import SCRIPTS, backend, script

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="the article's program puts work on two GPUs; this machine has fewer (its CPU path is tested beside it)",
)
no_ranks = pytest.mark.skipif(Layout.chosen() is not None, reason="--job: this program is one process")


def load(name):
    spec = importlib.util.spec_from_file_location(f"article_program_{name}", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lines(result):
    """Sorted: two processes write to one pipe, and either may be first."""
    return sorted(result.output.splitlines())


def test_init_processes():
    result = script("init_processes")
    said = result.json_by_rank()
    assert sorted(said) == [0, 1], str(result)
    for rank, value in said.items():
        assert value == {"rank": rank, "size": 2, "backend": backend(), "initialized": True, "tensor_device": "cpu"}


def test_p2p_blocking():
    result = script("p2p_blocking")
    assert lines(result) == ["Rank  0  has data  tensor(1.)", "Rank  1  has data  tensor(1.)"], str(result)


def test_p2p_nonblocking():
    result = script("p2p_nonblocking")
    assert lines(result) == [
        "Rank  0  has data  tensor(1.)",
        "Rank  1  has data  tensor(1.)",
        "Rank 0 started sending",
        "Rank 1 started receiving",
    ], str(result)


def test_group_all_reduce():
    result = script("group_all_reduce")
    expected = []
    for rank in (0, 1):
        expected += [
            f"Rank  {rank}  has data  tensor(2.)",
            f"Rank  {rank}  has  SUM   tensor(5.)",
            f"Rank  {rank}  has  PRODUCT   tensor(6.)",
            f"Rank  {rank}  has  MAX   tensor(3.)",
            f"Rank  {rank}  has  MIN   tensor(2.)",
        ]
    assert lines(result) == sorted(expected), str(result)


def expected_six(rank, ranks):
    root, place = ranks[0], ranks.index(rank)
    product = 1.0
    for r in ranks:
        product *= 1.0 + r
    scattered = [10.0 + place] * 2
    gathered = [[20.0 + r] * 2 for r in ranks] if rank == root else None
    return {
        "scatter": scattered,
        "gather": gathered,
        "scatter_async": scattered,
        "gather_async": gathered,
        "reduce": [sum(1.0 + r for r in ranks)] * 2 if rank == root else None,
        "all_reduce": [product] * 2,
        "broadcast": [30.0 + root] * 2,
        "all_gather": [[40.0 + r] * 2 for r in ranks],
    }


def test_six_collectives():
    result = script("six_collectives")
    said = result.json_by_rank()
    assert sorted(said) == [0, 1, 2, 3], str(result)
    for rank, value in said.items():
        assert value["world"] == expected_six(rank, [0, 1, 2, 3])
        assert value["subgroup"] == (expected_six(rank, [1, 2, 3]) if rank else None)


def sgd_by_one_process(program, size):
    """The same training with no communication: the ranks take turns on one model.

    Each rank's random state is put back before its turn, so that shuffling and
    dropout are what they are in that rank's process.
    """
    states, loaders = [], []
    data = program.GeneratedDigits()
    for rank in range(size):
        torch.manual_seed(1234)
        part = program.DataPartitioner(data, [1.0 / size] * size).use(rank)
        loaders.append(torch.utils.data.DataLoader(part, batch_size=128 // size, shuffle=True))
        model = program.Net()
        states.append(torch.get_rng_state())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.5)
    losses = [[] for _ in range(size)]
    for _ in range(10):
        iterators = [None] * size
        epoch = [0.0] * size
        batches = len(loaders[0])
        for batch in range(batches + 1):
            grads = []
            for rank in range(size):
                torch.set_rng_state(states[rank])
                if batch == 0:
                    iterators[rank] = iter(loaders[rank])
                item = next(iterators[rank], None)
                if item is not None:
                    optimizer.zero_grad()
                    loss = F.nll_loss(model(item[0]), item[1])
                    epoch[rank] += loss.item()
                    loss.backward()
                    grads.append([p.grad.clone() for p in parameters])
                states[rank] = torch.get_rng_state()
            if grads:
                for i, p in enumerate(parameters):
                    p.grad = sum(g[i] for g in grads) / float(size)
                optimizer.step()
        for rank in range(size):
            losses[rank].append(epoch[rank] / batches)
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(p.detach().numpy().tobytes())
    return losses, digest.hexdigest()


def test_sgd_partitioned(one_thread):
    result = script("sgd_partitioned")
    printed = {0: {}, 1: {}}
    for rank, epoch, loss in re.findall(r"^Rank  (\d) , epoch  (\d) :  (\S+)$", result.output, re.M):
        printed[int(rank)][int(epoch)] = float(loss)
    said = result.json_by_rank()
    assert [said[r]["samples"] for r in (0, 1)] == [512, 512], str(result)
    assert said[0]["digest"] == said[1]["digest"], str(result)
    losses, digest = sgd_by_one_process(load("sgd_partitioned"), 2)
    for rank in (0, 1):
        # Exact: a sum of two floats does not depend on the order, and both runs use one thread.
        assert [printed[rank][e] for e in range(10)] == losses[rank], str(result)
        assert losses[rank][9] < 0.95 * losses[rank][0]
    assert said[0]["digest"] == digest


def outside_shapes(result):
    found = re.findall(
        r"^Outside: input size torch.Size\(\[(\d+), 5\]\) output_size torch.Size\(\[(\d+), 2\]\)$", result.output, re.M
    )
    return [tuple(map(int, f)) for f in found]


def inside_rows(result):
    return [
        int(n)
        for n in re.findall(
            r"In Model: input size torch.Size\(\[(\d+), 5\]\) output size torch.Size\(\[\d+, 2\]\)", result.output
        )
    ]


@no_ranks
def test_data_parallel_random_dataset_on_cpu():
    result = script("data_parallel_random_dataset", env={"CUDA_VISIBLE_DEVICES": ""})
    assert outside_shapes(result) == [(30, 30), (30, 30), (30, 30), (10, 10)], str(result)
    assert inside_rows(result) == [30, 30, 30, 10], str(result)


@two_gpus
def test_data_parallel_random_dataset_on_two_gpus():
    result = script("data_parallel_random_dataset", env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "Let's use 2 GPUs!" in result.output
    assert outside_shapes(result) == [(30, 30), (30, 30), (30, 30), (10, 10)], str(result)
    assert inside_rows(result) == [15] * 6 + [5] * 2, str(result)


def toy_model():
    torch.manual_seed(42)
    net = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    return net


def parameter_sum(model):
    return sum(p.detach().double().sum().item() for p in model.parameters())


def test_ddp_basic(one_thread):
    result = script("ddp_basic")
    said = result.json_by_rank()
    assert sorted(said) == [0, 1], str(result)
    own = [torch.tensor(said[r]["own_grad"]) for r in (0, 1)]
    mean = own[0] / 2 + own[1] / 2
    assert not torch.equal(own[0], own[1])
    for rank in (0, 1):
        # Exact: halving is, and so is the order of two summands.
        assert said[rank]["ddp_grad"] == mean.tolist(), str(result)
        before = torch.tensor(said[rank]["before"])
        torch.testing.assert_close(torch.tensor(said[rank]["after"]), before - 0.001 * mean)
    assert said[0]["sum"] == said[1]["sum"]


def one_step():
    """The toy model of examples 7 and 8 after one step on a batch drawn next."""
    net = toy_model()
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    before = parameter_sum(net)
    outputs = net(torch.randn(20, 10))
    loss_fn(outputs, torch.randn(20, 5)).backward()
    optimizer.step()
    return before, parameter_sum(net)


def test_ddp_model_parallel_on_cpu(one_thread):
    result = script("ddp_model_parallel", env={"CUDA_VISIBLE_DEVICES": ""})
    said = result.json_by_rank()
    assert sorted(said) == [0, 1, 2, 3], str(result)
    _, after = one_step()
    for value in said.values():
        assert value["world_size"] == 4 and value["devices"] == ["cpu"]
        # Exact: every rank has the same batch, and the mean of four equal floats is that float.
        assert value["sum"] == after, str(result)


@two_gpus
def test_ddp_model_parallel_on_gpus():
    result = script("ddp_model_parallel")
    said = result.json_by_rank()
    world = torch.cuda.device_count() // 2
    assert sorted(said) == list(range(world)), str(result)
    _, after = one_step()
    for rank, value in said.items():
        assert value["devices"] == [f"cuda:{2 * rank}", f"cuda:{2 * rank + 1}"]
        # Not exact: the GPU's matrix product sums in another order.
        assert value["sum"] == pytest.approx(after, rel=1e-5)


def test_ddp_checkpoint(one_thread):
    result = script("ddp_checkpoint")
    said = result.json_by_rank()
    assert sorted(said) == [0, 1], str(result)
    before, after = one_step()
    for value in said.values():
        assert value["initial"] == before and value["loaded"] == before, str(result)
        assert value["final"] == after, str(result)


@no_ranks
def test_data_parallel_steps_on_cpu():
    result = script("data_parallel_steps", env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.output == "result:torch.Size([16, 20])\n", str(result)


@two_gpus
def test_data_parallel_steps_on_two_gpus():
    result = script("data_parallel_steps")
    for line in (
        "inputs:<class 'tuple'>",
        "input 0:torch.Size([8, 10])",
        "input 1:torch.Size([8, 10])",
        "outputs:<class 'list'>",
        "output 0:torch.Size([8, 20])",
        "output 1:torch.Size([8, 20])",
        "result:torch.Size([16, 20])",
    ):
        assert line in result.output.splitlines(), str(result)


def scattered(result):
    return [json.loads(line) for line in result.output.splitlines() if "nested" in line or "shapes" in line]


def check_scatter_without_tensors(value):
    assert value == {
        "nested": [[["a", [1, 2]], ["a", [1, 2]]], [{"k": {"n": 3}}, {"k": {"n": 3}}]],
        "more_kwargs": [[[], []], [{"k": 1}, {"k": 1}]],
        "more_inputs": [[[7], [7]], [{}, {}]],
    }


def test_scatter_kwargs_without_gpu():
    result = script("scatter_kwargs_streams", env={"CUDA_VISIBLE_DEVICES": ""})
    (value,) = scattered(result)
    check_scatter_without_tensors(value)
    said = result.json_by_rank()
    assert sorted(said) == [0, 1], str(result)
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for rank, value in said.items():
        x = torch.arange(6.0).view(3, 2) + rank
        assert value["output"] == (2.0 * (x @ weight)).tolist()
        # d(sum of outputs)/dW = 2 * column sums of x; over the ranks these are 6, 9 and 9, 12.
        assert value["grad"] == [[15.0, 15.0], [21.0, 21.0]], str(result)


@two_gpus
def test_scatter_kwargs_with_streams():
    result = script("scatter_kwargs_streams")
    value, on_gpus = scattered(result)
    check_scatter_without_tensors(value)
    assert on_gpus == {
        "shapes": [[8, 2], [7, 2]],
        "devices": ["cuda:0", "cuda:1"],
        "kwargs": [{"factor": 2.0}, {"factor": 2.0}],
        "output_matches": True,
        "x_grad_device": "cpu",
        "x_grad": [6.0, 14.0],
    }, str(result)
