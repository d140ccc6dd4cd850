"""After a loss: the ranks that are left go on in their processes (shrink_group), or torchrun starts all again."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import c10d_custom
from c10d_custom.errors import CollectiveMismatchError, CollectiveTimeoutError, UsageError
from programs.launch import start

pytestmark = pytest.mark.lane2

HERE = Path(__file__).parent


def script(name, *arguments, seconds=120):
    done = subprocess.run(
        [sys.executable, HERE / name, *map(str, arguments)], capture_output=True, text=True, timeout=seconds
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(2, id="another", marks=pytest.mark.full("the harder one is below")),
        pytest.param(0, id="the one that serves the store"),
    ],
)
def test_three_of_four_train_on_in_their_processes(victim):
    result, done = script("train_on.py", victim)
    assert not result["stuck"] and all(
        code == (-9 if rank == victim else 0) for rank, code in enumerate(result["codes"])
    ), done
    said = result["said"]
    assert [(s["rank"], s["size"]) for s in said] == [(0, 3), (1, 3), (2, 3)], said  # renumbered in their old order
    for s, expected in zip(said, result["expected"]):
        assert "PeerLostError: all_reduce" in s["error"] and f"rank {victim} (pid" in s["error"], s
        assert s["resumed_at"] == 17 and s["bits"] == expected, s
        assert s["last"] < 0.02 * s["first"], s


def absent_case():
    rank = dist.get_rank()
    before = dist.new_group()
    if rank == 2:
        time.sleep(1.5)
    else:
        time.sleep(0.3 * (rank == 0))  # rank 1 calls again while rank 0 is still in its first call
        with pytest.raises(CollectiveTimeoutError, match="rank 2 neither came nor ended in 0.[45]"):
            c10d_custom.shrink_group(timedelta(seconds=0.5))
        assert dist.get_world_size() == 3
    group = c10d_custom.shrink_group(timedelta(seconds=30))
    assert group is dist.group.WORLD and (dist.get_rank(), dist.get_world_size()) == (rank, 3)
    with pytest.raises(ValueError):
        dist.get_rank(before)  # destroyed, with all the others
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.world_sizes(3)
def test_a_rank_that_does_not_come_is_named_and_may_come_later(ranks):
    assert ranks.run(absent_case) == [3] * 3


def broken_case():
    with pytest.raises(CollectiveMismatchError):
        dist.all_reduce(torch.ones(1 + dist.get_rank()))
    c10d_custom.shrink_group()
    total = torch.tensor([1])
    dist.all_reduce(total, group=dist.new_group())
    return total.item()


@pytest.mark.world_sizes(2, 4)
def test_where_nobody_has_died_it_makes_a_broken_group_anew(ranks):
    assert ranks.run(broken_case) == [ranks.world_size] * ranks.world_size


def torch_s_own_case():
    if not hasattr(dist, "shrink_group"):
        return None
    with pytest.raises(TypeError, match="does not support shrinking"):
        dist.shrink_group([1])


@pytest.mark.world_sizes(2)
def test_torch_s_own_shrink_group_says_that_it_cannot(ranks):
    ranks.run(torch_s_own_case)


def test_without_a_default_group_it_is_refused():
    with pytest.raises(UsageError, match="default group"):
        c10d_custom.shrink_group()


def test_torchrun_restarts_from_a_checkpoint(tmp_path):
    from .training import reference

    result = start(
        [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "--max-restarts",
            "1",
            "--monitor-interval",
            "0.1",
            HERE / "elastic.py",
            tmp_path,
        ],
        deadline=120,
    )
    said = result.json_by_rank()
    assert result.code == 0 and not result.left_over and sorted(said) == [0, 1], str(result)
    for value in said.values():
        # The death was in step 17; the last checkpoint but perhaps one before it is used.
        assert value["attempt"] == 1 and value["began_at"] in (16, 17), str(result)
        assert value["bits"] == reference(30, lambda _: 2), str(result)


@pytest.mark.timeout(400)
def test_a_short_soak(full):
    minutes = 3 if full else 0.25
    result, done = script(
        "soak.py", "--minutes", minutes, "--life", 1, "--seed", os.environ.get("SOAK_SEED", "1"), seconds=390
    )
    assert done.returncode == 0 and not result["wrong"], done.stderr
    assert result["killed"] > 0 and result["shrunk"] > 0 and result["operations"] > 0, result
