import numpy as np
import pytest
import torch
import torch.distributed as dist

from c10d_custom.errors import UsageError

from . import reference, values
from .cases import Case, check, finish
from .cases import group as make_group
from .selection import SECTIONS
from .test_all_to_all import split, split_start


def _joined(dtype, parts):
    return torch.cat([values.raw(part) for part in parts]).view(dtype)


def all_to_all_single(case, group):
    data = group.placed_input(case, group.size * case.count)
    output = group.output(case, group.size * case.count)
    work = dist.all_to_all_single(output.tensor, data.tensor, group=group.pg, async_op=case.async_op)
    finish(work, case)
    want = [group.input(case, i, start=group.me * case.count) for i in range(group.size)]
    yield "output", output, _joined(case.dtype, want)
    yield "input", data, group.input(case, count=group.size * case.count)


def all_to_all_single_uneven(case, group):
    me, everyone = group.me, range(group.size)
    sent, received = [split(case, me, i) for i in everyone], [split(case, i, me) for i in everyone]
    data, output = group.placed_input(case, sum(sent)), group.output(case, sum(received))
    work = dist.all_to_all_single(
        output.tensor, data.tensor, _rows(output.tensor, received), _rows(data.tensor, sent), group.pg, case.async_op
    )
    finish(work, case)
    want = [group.input(case, i, split(case, i, me), split_start(case, i, me)) for i in everyone]
    yield "output", output, _joined(case.dtype, want)


def _rows(tensor, splits):
    width = tensor.shape[1:].numel()
    return [split // width for split in splits]


@pytest.mark.parametrize("section", SECTIONS)
def test_all_to_all_single(conform, section):
    conform(all_to_all_single, section)


@pytest.mark.parametrize("section", SECTIONS)
def test_all_to_all_single_uneven(conform, section):
    conform(all_to_all_single_uneven, section)


def _kinds_of_splits():
    g, wrong = make_group(), []
    data, output = torch.arange(2.0 * g.size), torch.empty(2 * g.size)
    for kind in (np.array, torch.tensor, tuple, lambda splits: list(np.array(splits))):
        dist.all_to_all_single(output, data, kind([2] * g.size), kind([2] * g.size))
        wrong += [output] * (output.tolist() != [2.0 * g.me, 2.0 * g.me + 1] * g.size)
    return wrong


def test_splits_may_be_any_sequence_of_numbers(ranks):
    check(ranks, _kinds_of_splits)


def _no_splits():
    g, wrong = make_group(), []
    data, output = torch.arange(2.0 * g.size), torch.empty(2 * g.size)
    for splits in ([2.0] * g.size, dict.fromkeys(range(g.size), 2), set(range(g.size)), 2):
        try:
            dist.all_to_all_single(output, data, None, splits)
            wrong.append(f"{splits} were taken")
        except UsageError as error:
            wrong += [str(error)] * ("split" not in str(error))
    dist.barrier()
    return wrong


def test_what_is_no_sequence_of_numbers_is_refused(ranks, beyond_gloo):
    beyond_gloo("says so with an error of its own")
    check(ranks, _no_splits)


def _output_is_input(counts):
    g = make_group()
    wrong = []
    for count in counts:
        case = Case(torch.float32, count)
        data = g.input(case, count=g.size * count)
        dist.all_to_all_single(data, data)
        want = _joined(case.dtype, [g.input(case, i, start=g.me * count) for i in range(g.size)])
        wrong += filter(None, [reference.difference(data, want)])
    return wrong


def test_output_is_input(ranks, beyond_gloo):
    beyond_gloo("reads what it has overwritten")
    check(ranks, _output_is_input, (0, 1, 7, 5000, 50001, 300007))
