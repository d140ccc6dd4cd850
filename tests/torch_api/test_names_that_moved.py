"""A torch in which something that we rest on has moved: the group is made, what rests on it is off, one warning says
so."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from c10d_custom.c10d import torch_private
from c10d_custom.c10d.torch_private import REGISTERED

from . import names

PROGRAM = """
import warnings
import torch
{moved}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import torch.distributed as dist
    for life in range(2):
        dist.init_process_group("custom", store=dist.HashStore(), rank=0, world_size=1)
        t = torch.arange(3.0)
        dist.all_reduce(t)
        dist.all_reduce(t, async_op=True).wait()
        assert t.tolist() == [0.0, 1.0, 2.0]
        assert dist.group.WORLD._device_types[0].type == "cpu"
        dist.barrier()
        assert dist.new_group([0]) is not None
        dist.destroy_process_group()
ours = [str(w.message) for w in seen if "c10d-custom" in str(w.message)]
print(len(ours), *ours)
"""
# The function that makes groups has another name.
WHO_ASKS = """
from torch.distributed.distributed_c10d import _new_process_group_helper as helper
helper.__code__ = helper.__code__.replace(co_name="moved")
"""
MOVED = {
    "the profiler": ("del torch.autograd._profiler_enabled", 0, ""),
    "dynamo": ("import torch._C._dynamo.eval_frame as e; del e.set_code_exec_strategy", 1, "torch.compile"),
    "graph inputs": ("import torch._C._distributed_c10d as c; del c._register_work", 1, "inputs of compiled graphs"),
    "who asks": (WHO_ASKS, 2, "which devices"),  # and what groups over several jobs rest on
    **(
        {"a Backend in C++": ("del torch._C._distributed_c10d.ProcessGroup._register_backend", 1, "torch.ops.c10d")}
        if REGISTERED
        else {}
    ),
}


def python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("which", MOVED)
def test_a_group_is_made_all_the_same(which):
    moved, warnings, words = MOVED[which]
    done = python(PROGRAM.format(moved=moved))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{warnings} ") or done.stdout.strip() == str(warnings), done.stdout + done.stderr
    assert words in done.stdout


@pytest.mark.skipif(not REGISTERED, reason="torch before 2.14 gives a maker of backends nothing to tell by")
@pytest.mark.parametrize("string", ["cpu:gloo,cuda:custom", "cpu:custom,cuda:gloo"])
def test_where_it_cannot_be_told_no_backend_is_dropped(string):
    done = python(PROGRAM.format(moved=WHO_ASKS).replace('"custom"', f'"{string}"'))
    assert "UsageError" in done.stderr and "make two groups" in done.stderr, done.stdout


def test_a_rendezvous_that_moved_does_not_break_import_torch():
    done = python(
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "import warnings; warnings.simplefilter('error', UserWarning)\n"
        "import sys, torch, torch.distributed as dist\n"
        "del sys.modules['torch.distributed.rendezvous']._rendezvous_handlers\n"
        "import c10d_custom\n"  # autoload runs, as torch would have had it
        "print(dist.is_backend_available('custom'))"
    )
    assert done.stdout.strip() == "True", done.stderr
    assert "MPI job is off" in done.stderr


def test_a_newer_torch_starts():
    done = python(PROGRAM.format(moved="torch.__version__ = '9.9.0'"))
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_the_version_is_of_a_torch_that_this_was_written_for():
    assert tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 11)


@pytest.mark.parametrize("row", list(names.rows()), ids=lambda row: row[0][:60])
def test_what_we_rest_on_is_used_where_it_is_said(row):
    name, files, _, _ = row
    last = name.split(",")[0].split(":")[0].split(".")[-1]
    package = Path(torch_private.__file__).parents[1]
    for file in files:
        path = next(p for p in (package / file, package / "c10d" / file) if p.is_file())
        assert name.startswith("libc10") or last in path.read_text().split('"""', 2)[2], (last, file)


# Private attributes of what is neither torch's nor ours: Python's, mpi4py's, torchft's.
NOT_TORCHS = {"_getframe", "_exit", "_addressof", "_handleof", "_sizeof", "_pg", "_quorum_id"}


def test_what_we_use_of_torchs_private_names_is_said():
    """Those that a module reaches from its imports, by their full names; and private attributes of anything else that
    are not this package's own. Not those of the tools."""
    package = Path(torch_private.__file__).parents[1]
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
    own = set().union(*(names.attributes(tree)[1] for tree in trees.values())) | NOT_TORCHS
    unsaid = {}
    for path, tree in trees.items():
        file = str(path.relative_to(package)).removeprefix("c10d/")
        if file.startswith(("bench/", "doctor/")):
            continue
        said = {n for name, files, _, _ in names.rows() for n in names.each(name) if file in files}
        within = {".".join(n.split(".")[:i]) for n in said for i in range(n.count(".") + 2)}
        parts = {part for n in said for part in n.split(".")}
        reached = {n for n in names.private(tree) if n not in within and not any(n.startswith(f"{s}.") for s in said)}
        others = names.attributes(tree)[0] - own - parts
        if reached or others:
            unsaid[file] = sorted(reached | others)
    assert not unsaid


def test_this_torch_has_what_we_rest_on():
    assert not list(names.moved()), "docs/CONTRIBUTING.md, A torch renamed something"


def test_what_a_torch_lacks_is_named(monkeypatch):
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    monkeypatch.delattr(torch.distributed, "irecv")
    assert [name for name, _, _ in names.moved()] == [
        "torch.distributed.irecv",
        "torch.autograd.graph._engine_run_backward",
    ]
