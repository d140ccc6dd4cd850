"""Plain tensors that stand in for others (lowering/__init__.py)."""

import random

import pytest
import torch
from torch.distributed import ReduceOp

from c10d_custom.errors import UsageError
from c10d_custom.lowering import Lowering, overlaps_itself

STRIDED = {
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "with gaps": lambda: torch.arange(12.0)[::2],
    "channels last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "negated": lambda: torch._neg_view(torch.arange(5.0)),
    "conjugate": lambda: torch.full((3,), 1 + 2j).conj(),
}


@pytest.mark.parametrize("name", STRIDED)
def test_one_copy_stands_for_what_is_read_and_written(name):
    for t in (STRIDED[name](), STRIDED[name]().requires_grad_()):
        lower = Lowering(0, 2)
        for call in (lower.all_reduce(t, ReduceOp.SUM, 1.0), lower.reduce(t, 0, ReduceOp.SUM, 1.0)):
            (read,), (written,) = call.inputs, call.outputs
            assert read is written and read.is_contiguous() and not read.requires_grad
            assert torch.equal(read, t.detach()) and [back[1] for back in call.copy_back] == [written]


def test_one_that_is_only_read_gets_nothing_back():
    call = Lowering(1, 2).reduce(torch.ones(1).expand(6), 0, ReduceOp.SUM, 1.0)
    assert call.inputs[0].tolist() == [1] * 6 and not call.outputs and not call.copy_back


def test_which_elements_share_memory():
    chosen, found = random.Random(0), set()
    for _ in range(2000):
        sizes = [chosen.randint(0, 4) for _ in range(chosen.randint(0, 4))]
        strides = [chosen.randint(0, 9) for _ in sizes]
        t = torch.arange(1 + sum(max(n - 1, 0) * s for n, s in zip(sizes, strides))).as_strided(sizes, strides)
        shares = t.unique().numel() < t.numel()
        assert overlaps_itself(t) == shares, (sizes, strides)
        found.add(shares)
    assert found == {True, False}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_refusal_names_the_operation(device):
    """Also where new tensors are of another device."""
    with torch.device(device), pytest.raises(UsageError, match=r"^broadcast: tensor has .* strides \[1, 1\]"):
        Lowering(1, 2).broadcast(torch.zeros(8, device="cpu").as_strided((2, 3), (1, 1)), 0, 1.0)
