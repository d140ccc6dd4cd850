"""Ranks that ask for different things: every one is told so, by a table of who asked for what, within a second of
the last one's call; nothing is written to any tensor or beside it; and the group says why it is of no more use."""

import re
import statistics
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError, CustomBackendError, UsageError
from harness.groups import group_with_timeout

from .operations import COLLECTIVES, LONG, SMALL, Arena, Asked

OTHER = {"dtype": torch.int32, "redop": ReduceOp.MAX, "root": 1, "extra": 5}
TOLD = {"redop": "SUM", "dtype": "float32", "root": "root 0"}


def outcome(call, kind):
    """(the error that ``call`` raises and when; why that is wrong, or None)"""
    try:
        work = call()
        if work is not None:
            work.wait()
        return None, time.monotonic(), "nothing was raised"
    except kind as error:
        return error, time.monotonic(), None
    except Exception as error:
        return error, time.monotonic(), f"{type(error).__name__}: {error}"


def refusals(g):
    """What a group that is of no more use does not say of it."""
    wrong = []
    for call in (
        lambda: dist.barrier(g),
        lambda: dist.all_reduce(torch.ones(3), group=g, async_op=True),
        lambda: dist.send(torch.ones(3), group=g, group_dst=(g.rank() + 1) % g.size()),
    ):
        error, _, problem = outcome(call, CustomBackendError)
        if problem or "no more use" not in str(error) or "not called alike" not in str(error):
            wrong.append(f"afterwards: {problem or error}")
    error, _, problem = outcome(lambda: dist.all_reduce(torch.ones(1).expand(3), group=g), UsageError)
    if problem or "share memory" not in str(error):
        wrong.append(f"afterwards, of a call that is wrong by itself: {problem or error}")
    return wrong


def otherwise(call, asked, of_field):
    """The call and what it asks for, of the rank that deviates."""
    if of_field == "op":
        barrier = COLLECTIVES["barrier"][0]
        return (barrier if call is not barrier else COLLECTIVES["broadcast"][0]), asked
    other = {**OTHER, "count": asked.count + 1, "size": SMALL + LONG - asked.count}
    return call, replace(asked, **{"count" if of_field == "size" else of_field: other[of_field]})


def disagree(name, of_field, count, asynchronous, deviant, late):
    """One rank calls otherwise, and one comes ``late`` seconds after the others. (When it called, when it was told,
    what was wrong)"""
    g, arena = dist.new_group(), Arena()
    call, asked = COLLECTIVES[name][0], Asked(count, asynchronous=asynchronous)
    if g.rank() == deviant:
        call, asked = otherwise(call, asked, of_field)
    if late and g.rank() == g.size() - 1:
        time.sleep(late)
    began = time.monotonic()
    error, ended, problem = outcome(lambda: call(g, arena, asked), CollectiveMismatchError)
    wrong = [problem] if problem else []
    text = str(error)
    if not problem:
        wrong += [
            f"no line for rank {r} in: {text}"
            for r in range(g.size())
            if f"\n  rank {r}: " not in text or "has not called yet" in text
        ]
        if of_field in TOLD and TOLD[of_field] not in text:
            wrong.append(f"{TOLD[of_field]} not in: {text}")
        named = {"op": "op", "size": "count", "extra": ""}.get(of_field, of_field)
        if name.startswith("all_to_all") and named == "count":
            named = "sizes of their parts"
        if "they differ in" not in text or named not in text.partition("they differ in")[2].partition("\n")[0]:
            wrong.append(f"{of_field} not named in: {text}")
    wrong += [f"written: {found}" for found in arena.written()] + refusals(g)
    dist.destroy_process_group(g)
    case = f"{name}, {of_field}, {count}, async {asynchronous}, rank {deviant} deviates"
    return began, ended, [f"{case}: {w}" for w in wrong]


def disagreements(name, cases):
    return [disagree(name, *case) for case in cases]


def check(by_rank, late=()):
    """``by_rank``: of each rank a list of (called, told, wrong)."""
    problems = {problem for rank in by_rank for _, _, wrong in rank for problem in wrong}
    assert not problems, "\n".join(sorted(problems))
    seconds = sorted(max(ended for _, ended, _ in case) - max(began for began, _, _ in case) for case in zip(*by_rank))
    # None of the groups' time-outs: a rank that is told late has waited for something else than the disagreement.
    assert statistics.median(seconds) < 5.0 and seconds[-1] < 20.0, seconds


def cases_of(name, ranks, full):
    fields = ("op", *COLLECTIVES[name][1])
    cases = []
    for i, of_field in enumerate(fields + (("size",) if "count" in fields else ())):
        for j, count in enumerate((SMALL, LONG)):
            for asynchronous in (False, True) if full else ((i + j) % 2 == 1,):
                cases.append((of_field, count, asynchronous, (i + j) % ranks, 0))
    return cases


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_rank_is_told_and_nothing_is_written(ranks, name, full):
    check(ranks.run(disagreements, name, cases_of(name, ranks.world_size, full)))


@pytest.mark.world_sizes(2)
def test_two_ranks(ranks):
    for name in ("all_reduce", "all_gather", "gather", "all_to_all_single"):
        check(ranks.run(disagreements, name, cases_of(name, 2, False)))


def in_the_operation_alone(name, other):
    g, arena = dist.new_group(), Arena()
    call = COLLECTIVES[other if g.rank() == 1 else name][0]
    error, _, problem = outcome(lambda: call(g, arena, Asked()), CollectiveMismatchError)
    wrong = [problem] if problem else []
    if not problem and not re.search(r"they differ in op\W", str(error)):
        wrong.append(str(error))
    return wrong + arena.written() + refusals(g)


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize(
    "name, other",
    [("gather", "scatter"), ("gather", "broadcast"), ("all_reduce_coalesced", "reduce_scatter_single_coalesced")],
)
def test_operations_for_which_all_else_may_be_alike(ranks, name, other):
    assert not any(found := ranks.run(in_the_operation_alone, name, other)), found


@pytest.mark.world_sizes(3)
def test_a_rank_that_comes_late_is_in_the_table(ranks):
    cases = [("count", count, False, deviant, 0.4) for count in (SMALL, LONG) for deviant in (0, 2)]
    check(ranks.run(disagreements, "all_reduce", cases))


def comes_last(name, count):
    """The last rank comes when the others have been told without it."""
    g, arena = dist.new_group(), Arena()
    if g.rank() == 2:
        time.sleep(1.6)
    asked = Asked(count + g.rank() % 2)
    error, _, problem = outcome(lambda: COLLECTIVES[name][0](g, arena, asked), CollectiveMismatchError)
    wrong = [problem] if problem else []
    if not problem and ("rank 2: has not called yet" in str(error)) != (g.rank() != 2):
        wrong.append(str(error))
    return wrong + arena.written() + refusals(g)


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("name, count", [("all_reduce", SMALL), ("all_gather", LONG)])
def test_who_comes_when_the_others_were_told_is_told_too(ranks, name, count):
    assert not any(found := ranks.run(comes_last, name, count)), found


def other_order(asynchronous):
    """Two collectives, which one rank issues the other way round."""
    g, arena = dist.new_group(), Arena()
    wrong, errors = [], []
    names = ["all_reduce", "all_gather_single"]
    if g.rank() == 1:
        names.reverse()
    began, works = time.monotonic(), []
    for name in names:
        try:
            works.append(COLLECTIVES[name][0](g, arena, Asked(asynchronous=asynchronous)))
        except CustomBackendError as error:
            errors.append(error)
    for work in works:
        try:
            work.wait()
        except CustomBackendError as error:
            errors.append(error)
    if len(errors) != 2 or not isinstance(errors[0], CollectiveMismatchError) or "they differ in" not in str(errors[0]):
        wrong.append(repr(errors))
    elif "its collective #1 was not called alike" not in str(errors[1]):
        wrong.append(str(errors[1]))
    return [(began, time.monotonic(), wrong + arena.written() + refusals(g))]


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_another_order(ranks, asynchronous):
    check(ranks.run(other_order, asynchronous))


def parts_between_others(count, form):
    """Ranks 0 and 1 disagree over what one sends the other; both agree with rank 2."""
    g, arena = dist.new_group(), Arena()
    rank, n = g.rank(), g.size()
    sent, got = [count] * n, [count] * n
    if rank == 0:
        sent[1] += 3
    sends, gets = [[arena.tensor(size, torch.float32) for size in sizes] for sizes in (sent, got)]
    began = time.monotonic()
    if form == "list":
        call = lambda: dist.all_to_all(gets, sends, group=g)
    else:
        call = lambda: dist.all_to_all_single(
            arena.tensor(sum(got), torch.float32), arena.tensor(sum(sent), torch.float32), got, sent, group=g
        )
    error, ended, problem = outcome(call, CollectiveMismatchError)
    text = str(error)
    wrong = [problem] if problem else [] if "sizes of their parts" in text else [text]
    wrong += [
        f"not in the table: {line}"
        for line in (
            f"rank 0: all_to_all #1 float32[uneven]: gives {count}, {count + 3}, {count}, gets {count}, {count}, "
            f"{count}\n",
            f"rank 1: all_to_all #1 float32[uneven]: gives {count}, {count}, {count}, gets {count}, {count}, {count}\n",
        )
        if line not in text
    ]
    return [(began, ended, wrong + arena.written() + refusals(g))]


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("form", ["list", "single"])
@pytest.mark.parametrize("count", [SMALL, LONG])
def test_a_rank_that_agrees_with_both_of_two_others_is_told_too(ranks, count, form):
    check(ranks.run(parts_between_others, count, form))


def part_of_one(name, count, root, deviant):
    """An uneven gather or scatter in which one rank's part is another than the root says."""
    g, arena = dist.new_group(), Arena()
    rank = g.rank()
    counts = [count + 3 * r for r in range(g.size())]
    own = arena.tensor(counts[rank] + (rank == deviant), torch.float32)
    parts = [arena.tensor(size, torch.float32) for size in counts] if rank == root else []
    began = time.monotonic()
    error, ended, problem = outcome(lambda: getattr(dist, name)(own, parts or None, root, g), CollectiveMismatchError)
    what, table = "gets" if name == "gather" else "gives", f"root {root}: "
    wrong = [problem] if problem else [] if "in the sizes of their parts" in str(error) else [str(error)]
    wrong += [
        f"{line} is not in: {error}"
        for line in (
            f"rank {root}: {name} #1 float32[uneven] {table}{what} {', '.join(map(str, counts))}",
            f"rank {deviant}: {name} #1 float32[{counts[deviant] + 1}]",
        )
        if line not in str(error)
    ]
    return [(began, ended, [f"{name}, {count}, {root}, {deviant}: {w}" for w in wrong + arena.written() + refusals(g)])]


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("name", ["gather", "scatter"])
@pytest.mark.parametrize("count", [1, LONG])
def test_an_uneven_part_that_the_root_does_not_expect(ranks, name, count):
    for root, deviant in ((0, 2), (1, 0)):
        check(ranks.run(part_of_one, name, count, root, deviant))


def other_group():
    """Two groups of the same ranks, and a collective on one here, on the other there: neither sees the other."""
    groups = [group_with_timeout(timedelta(seconds=0.7)) for _ in range(2)]
    rank, wrong = dist.get_rank(), []
    mine = groups[rank == 1]
    error, _, problem = outcome(lambda: dist.all_reduce(torch.ones(3), group=mine), CollectiveTimeoutError)
    missing = str(error).partition("Missing: ")[2].partition(". ")[0]
    others = [r for r in range(dist.get_world_size()) if (r == 1) != (rank == 1)]
    if problem or missing != ", ".join(f"rank {r}" for r in others):
        wrong.append(problem or str(error))
    return wrong


@pytest.mark.world_sizes(3)
def test_calls_on_different_groups_time_out_and_name_who_is_on_the_other(ranks):
    assert not any(found := ranks.run(other_group)), found


def other_members(lists):
    """new_group with a list of its own on each rank: (when it called, when it was told, what was wrong)"""
    rank, wrong = dist.get_rank(), []
    began = time.monotonic()
    error, ended, problem = outcome(
        lambda: dist.new_group(lists[rank], timeout=timedelta(seconds=30)) and None, CollectiveMismatchError
    )
    text, own = str(error), f"rank {rank}: ranks "
    if rank not in lists[rank]:  # and so waits for nobody, and is told nothing
        wrong += [] if error is None else [problem]
    else:
        wrong += [problem] if problem else []
        # Who gave up may not have known this one's.
        if "different members" not in text or own not in text and " gave up: " not in text:
            wrong.append(f"no {own} in: {text}")
        different = [r for r in range(3) if r in lists[r] and lists[r] != lists[rank]]
        if not any(f"\n  rank {r}: ranks " in text for r in different):
            wrong.append(f"no other rank's list in: {text}")
    # The ranks' counts of groups are as they were, and another group can be made.
    t = torch.ones(3)
    dist.all_reduce(t, group=dist.new_group())
    return [(began, ended, wrong + ([] if t[0] == 3 else [str(t)]))]


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize(
    "lists",
    [
        ([0, 1, 2], [0, 1, 2], [0, 2]),
        ([0, 1, 2], [1, 2], [0, 1, 2]),
        ([0, 1], [0, 1, 2], [0, 1, 2]),
        ([0, 2], [0, 1], [0, 1]),  # rank 0 does not look at what rank 1 says
        ([0, 2], [0, 1], [1, 2]),
    ],
    ids=str,
)
def test_a_group_of_which_ranks_were_given_different_members(ranks, lists):
    check(ranks.run(other_members, lists))
