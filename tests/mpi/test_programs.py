"""Scripts under mpirun and torchrun, on this machine and over emulated hosts. The articles' programs: programs, with
--job."""

import hashlib
import socket
from pathlib import Path

import pytest
import torch

from harness import Layout
from programs.launch import AS_RANK, finish

pytestmark = pytest.mark.lane3

TRAIN = Path(__file__).with_name("scripts") / "train.py"


def one_process(ranks_per_host):
    """train.py's parameters: the same training by one process, gradients added in the documented order:
    the ranks of each host, then the hosts."""
    size = sum(ranks_per_host)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = [torch.Generator().manual_seed(100 + rank) for rank in range(size)]
    for _ in range(5):
        host_of = [host for host, count in enumerate(ranks_per_host) for _ in range(count)]
        by_host = [[None] * len(list(model.parameters())) for _ in ranks_per_host]
        for host, generator in zip(host_of, data, strict=True):
            x, y = torch.randn(16, 64, generator=generator), torch.randn(16, 8, generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            for i, p in enumerate(model.parameters()):
                mine = p.grad / size  # DDP divides first; by a power of two this is exact
                by_host[host][i] = mine if by_host[host][i] is None else by_host[host][i] + mine
        for i, p in enumerate(model.parameters()):
            total = by_host[0][i]
            for host in by_host[1:]:
                total = total + host[i]
            p.grad = total.clone()
        optimizer.step()
    torch.set_num_threads(threads)
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    "layout",
    [
        "3+1",
        "openmpi:3+1",
        *(
            pytest.param(layout, marks=pytest.mark.full("over 3+1 it is the same; test_demo trains by torchrun"))
            for layout in ("4", "2+2", "torchrun:2+2", "torchrun:3+1")
        ),
        *(
            pytest.param(
                layout,
                marks=pytest.mark.full("Open MPI starts the script over 3+1, and the ranks then do as with MPICH"),
            )
            for layout in ("openmpi:4", "openmpi:2+2")
        ),
    ],
)
def test_an_ordinary_script(layout, backend):
    layout = Layout.parse(layout)
    if reason := layout.why_not():
        pytest.skip(reason)
    # As it is with our backend; others are told by as_rank.py what mpirun tells nobody.
    script = [TRAIN] if backend == "custom" else [AS_RANK, TRAIN]
    said = finish(script, layout=layout, address=False, env={"C10D_TEST_BACKEND": backend}).json_by_rank()
    assert sorted(said) == [0, 1, 2, 3]
    names = ["hosta", "hostb"] if len(layout.ranks_per_host) > 1 else [socket.gethostname()]
    locations = [
        (name, local) for name, count in zip(names, layout.ranks_per_host, strict=True) for local in range(count)
    ]
    for rank, value in said.items():
        assert value["size"] == 4 and (value["host"], value["local_rank"]) == locations[rank]
    digests = {value["digest"] for value in said.values()}
    assert len(digests) == 1
    if backend != "gloo":  # which adds in an order of its own
        assert digests == {one_process(layout.ranks_per_host)}
