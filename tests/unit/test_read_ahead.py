"""What a failing or ending call may have to load is read with the first group: c10d/read_ahead.py."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import c10d_custom
import c10d_custom.c10d.process_group
from c10d_custom.c10d import read_ahead

ROOT = Path(c10d_custom.__file__).parent
TOOLS = {"bench", "doctor", "trace"}

# Imports inside functions (module, function) that need not be read ahead, and why not.
WHILE_A_GROUP_IS_MADE = {
    ("", "autoload"),
    ("", "_let_ranks_be_found"),
    ("", "_mpi_rendezvous"),
    ("", "_env_rendezvous"),
    ("", "register"),
    ("", "replace"),
    ("c10d.meeting", "meet"),
    ("c10d.meeting", "_over_hosts"),
    ("c10d.meeting", "_install_signal"),
    ("c10d.process_group", "build_later"),
    ("c10d.registration", "create"),
    ("c10d.registration", "_for_some_devices"),
    ("c10d.registration", "_device_map"),
    ("c10d.replacing", "replace"),
    ("c10d.replacing", "_in_the_table"),
    ("creation.bounded_store", "whole"),
}
WHAT_THE_PROGRAM_ASKS_FOR = {  # for the first time, of a group that is well; shrink_group makes another
    ("", "restore"),
    ("", "empty"),
    ("", "shrink_group"),
    ("", "__getattr__"),
    ("__main__", "main"),
    ("c10d.backend", "allocate_tensor"),
    ("c10d.issuing", "_sparse_all_reduce"),
    ("c10d.issuing", "new_window"),
    ("c10d.process_group", "reconfigure"),  # its module is imported when the group is made
    ("transport.shm", "take"),
    ("transport.by_device", "_open"),  # the first CUDA tensor
    ("transport.by_device", "submit"),  # and after it
}
EXEMPT = WHILE_A_GROUP_IS_MADE | WHAT_THE_PROGRAM_ASKS_FOR


def modules():
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if name.split(".")[0] not in TOOLS:
            yield name, path


def imports(name, path, node, function=None):
    """(function, module of ours) of every import at or below ``node``, but for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.level:
            package = path.relative_to(ROOT).parts[:-1]
            base = [*package[: len(package) - child.level + 1], *(child.module or "").split(".")]
            for alias in child.names:
                whole = ".".join(filter(None, [*base, alias.name]))
                yield (
                    function,
                    whole
                    if ROOT.joinpath(*whole.split(".")).with_suffix(".py").exists()
                    else ".".join(filter(None, base)),
                )
        inner = child.name if isinstance(child, ast.FunctionDef) else function
        yield from imports(name, path, child, inner)


def test_every_import_inside_a_function_is_read_ahead_or_need_not_be():
    unread, seen = [], set()
    for name, path in modules():
        for function, target in imports(name, path, ast.parse(path.read_text())):
            if function is None:
                continue
            seen.add((name, function))
            if (name, function) not in EXEMPT and target not in read_ahead.NAMES and target not in LOADED:
                unread.append((name, function, target))
    assert not unread, f"add to c10d/read_ahead.py, or say here why not: {unread}"
    assert seen >= EXEMPT, f"say no more of {EXEMPT - seen}"


def loaded_with_a_group():
    code = "import sys, c10d_custom.c10d.process_group, c10d_custom.c10d.registration; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


EVERYTHING = loaded_with_a_group()
LOADED = {m.removeprefix("c10d_custom").lstrip(".") for m in EVERYTHING if m.split(".")[0] == "c10d_custom"}


@pytest.mark.parametrize("name", read_ahead.NAMES)
def test_what_is_read_imports_nothing_that_is_not(name):
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text())
    at_the_top = {target for function, target in imports(name, path, tree) if function is None}
    before = set(read_ahead.NAMES[: read_ahead.NAMES.index(name)])
    assert at_the_top <= LOADED | before
    for node in tree.body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert set(names) <= EVERYTHING, names


FROM_A_ZIP_FILE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist, c10d_custom
from c10d_custom.c10d.read_ahead import NAMES
assert c10d_custom.__file__.startswith(sys.argv[1]), c10d_custom.__file__
dist.init_process_group("custom", rank=0, world_size=1, store=dist.HashStore())
os.remove(sys.argv[1])
for name in NAMES:
    __import__(f"c10d_custom.{name}")
dist.group.WORLD.abort()
try:
    dist.all_reduce(torch.ones(1))
except dist.DistError as error:
    print(type(error).__name__)
"""


def test_from_a_zip_file(tmp_path):
    """As a zipapp has it: the native core is taken out of it to be loaded, and what an error needs is in memory."""
    archive = tmp_path / "bundle.zip"
    with zipfile.ZipFile(archive, "w") as bundle:
        for path in ROOT.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                bundle.write(path, path.relative_to(ROOT.parent))
    done = subprocess.run([sys.executable, "-c", FROM_A_ZIP_FILE, archive], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["AbortedError"], done.stderr
