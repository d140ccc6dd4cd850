"""The package as a whole: what importing it does and costs, which way its imports run, whether the
tables it publishes agree with each other."""

import ast
import ctypes
import graphlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import c10d_custom
from c10d_custom import _version, config, dtypes
from c10d_custom.call import SHAPES, Op
from c10d_custom.native import OK, lib

pytestmark = pytest.mark.lane2

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "python" / "c10d_custom"

# Imports go down this list, and a module's own package may import in one direction only. "" is the package's root.
LEAVES = {"_version", "call", "config", "dtypes", "errors", "extras", "host", "plotting", "threads"}
LAYERS = [
    *("bench", "doctor", "", "c10d", "recovery", "trace", "lowering", "transport", "creation", "launch", "native"),
    LEAVES,
]
TOOLS = ("bench", "doctor")
MODULES = 30  # at most, with which a rank starts on one host, its packages among them
PEERS = ("transport.shm", "transport.hosts", "transport.cuda")


def python(code, **env):
    return subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, **env},
    )


def test_importing_torch_registers_the_backend():
    out = python(
        "import sys, torch.distributed as dist; print(dist.is_backend_available('custom'), "
        "'c10d_custom.c10d.process_group' in sys.modules)"
    )
    assert out.stdout.split() == ["True", "False"], out.stderr  # registered, and nothing heavy loaded


def test_importing_us_registers_where_autoload_is_off():
    out = python(
        "import torch.distributed as dist; assert not hasattr(dist.Backend, 'CUSTOM'); "
        "import c10d_custom; c10d_custom.register(); print(dist.Backend.CUSTOM)",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out.stdout.split() == ["custom"], out.stderr


def test_importing_us_before_torch_registers_without_a_warning():
    out = python("import c10d_custom, torch.distributed as dist; print(dist.is_backend_available('custom'))")
    assert (out.stdout.split(), out.stderr) == (["True"], "")


def test_a_broken_registration_does_not_break_import_torch():
    out = python(
        "import torch, warnings, c10d_custom; c10d_custom._let_ranks_be_found = lambda: 1 / 0\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always'); c10d_custom.autoload()\n"
        "print(len(seen), 'ZeroDivisionError' in str(seen[0].message))"
    )
    assert out.stdout.split() == ["1", "True"], out.stderr


def test_optional_packages_are_not_imported():
    out = python(
        "import sys, torch, c10d_custom.c10d.process_group; print([m for m in ('cupy', 'mpi4py', 'matplotlib', "
        "'numpy.f2py', 'torchft', 'c10d_custom.torchft') if m in sys.modules])"
    )
    assert out.stdout.strip() == "[]", out.stderr


def modules():
    for path in SOURCES.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        yield name.removesuffix("__init__").rstrip("."), path


def imported(name, path):
    """Modules of ours that a module imports, anywhere in it."""
    package = ["c10d_custom", *path.relative_to(SOURCES).parts[:-1]]
    names = {n for n, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        base = ".".join(base[1:])
        for alias in node.names:
            target = f"{base}.{alias.name}".strip(".")
            yield target if target in names else base


def layer(name):
    package = name.split(".")[0]
    return len(LAYERS) - 1 if name in LEAVES else LAYERS.index(package if package in LAYERS else "")


def arrows():
    for name, path in modules():
        if name != "__main__":  # the tools' command line
            for target in imported(name, path):
                yield name, target


def test_imports_run_down():
    wrong = [f"{a} imports {b}" for a, b in arrows() if layer(b) < layer(a)]
    assert not wrong, wrong


def test_nothing_imports_the_tools():
    wrong = [
        f"{a} imports {b}" for a, b in arrows() for tool in TOOLS if b.split(".")[0] == tool and a.split(".")[0] != tool
    ]
    assert not wrong, wrong


def test_transports_do_not_import_each_other():
    def peer(name):
        return next((p for p in PEERS if name.startswith(p)), None)

    wrong = [f"{a} imports {b}" for a, b in arrows() if peer(a) and peer(b) and peer(a) != peer(b)]
    assert not wrong, wrong


def test_no_modules_import_each_other_in_a_circle():
    graph = {}
    for a, b in arrows():
        if a and b:  # the package's face imports when it is called
            graph.setdefault(a, set()).add(b)
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(error.args[1]) from None


def test_what_may_be_patched_comes_from_one_place():
    """gevent and eventlet replace these modules' contents: threads.py."""
    wrong = []
    for name, path in modules():
        if name == "threads" or name.split(".")[0] in TOOLS:
            continue
        text = path.read_text()
        found = re.findall(
            r"^ *(?:import|from) (_thread|queue|select|selectors|socket|threading)\b", text, re.MULTILINE
        )
        sleeps = "time.sleep" in text and not re.search(r"^from \.+threads import .*\btime\b", text, re.MULTILINE)
        wrong += [(name, *found)] * bool(found or sleeps)
    assert not wrong, f"import them from threads.py: {wrong}"


A_RANK_S_START = """
import os, sys, torch, torch.distributed as dist
before = set(sys.modules)
rank = 0
if not (child := os.fork()):
    rank = 1
dist.init_process_group("custom", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
if rank == 0:
    print(*(n for n in sys.modules if n not in before and n.split(".")[0] == "c10d_custom"))
dist.destroy_process_group()
"""


def test_a_rank_starts_with_few_modules(tmp_path):
    """Of this package, from init_process_group to the end of the first all_reduce: each takes some 0.1 ms."""
    out = subprocess.run(
        [sys.executable, "-c", A_RANK_S_START, tmp_path / "store"], text=True, capture_output=True, timeout=60
    )
    loaded = out.stdout.split()
    assert "c10d_custom.transport.shm" in loaded, out.stderr
    assert len(loaded) <= MODULES, loaded


def test_the_root_is_small():
    assert len(list(SOURCES.glob("*.py"))) <= 12


def test_no_option_of_c10d_is_seen_below_its_package():
    for name, path in modules():
        if not name.startswith("c10d.") and name.split(".")[0] not in TOOLS:
            assert "asyncOp" not in path.read_text(), name


def test_python_and_native_agree_on_dtypes():
    text = (ROOT / "backend" / "shm" / "reduce.h").read_text()
    body = re.search(r"enum DType[^{]*{(.*?)kReducibleDTypes", text, re.S)[1]
    native = [n.lower() for n in re.findall(r"\bk(\w+)", body)]
    for d in dtypes.BY_DTYPE.values():  # an older torch lacks some
        if d.reduces:
            assert native[d.code] == d.name.replace("_", "").lower(), "dtypes.py and reduce.h differ at this place"
        else:
            assert d.code >= len(native), f"{d.name} of dtypes.py has no reduce op: its row belongs behind those"


def test_python_and_native_agree_on_operations():
    text = (ROOT / "backend" / "shm" / "api.h").read_text()
    body = re.sub("//.*", "", re.search(r"enum Op [^{]*{(.*?)kOps", text, re.S)[1])
    native = [n.lower() for n in re.findall(r"\bk(\w+)", body)]
    assert native == [op.name.replace("_", "") for op in sorted(Op)], "call.py and api.h number them alike"
    assert [*SHAPES, Op.rejected] == sorted(Op), "every operation has its Shape in call.py, and `rejected` is the last"


@pytest.mark.parametrize("dtype", dtypes.BY_DTYPE.values(), ids=lambda d: d.name)
def test_python_and_native_agree_on_what_reduces(dtype):
    for code, name in dtypes.REDUCE_OPS.items():
        status = lib.c10d_reduce(dtype.code, code, None, (ctypes.c_void_p * 1)(), 1, 0, None)
        assert (status == OK) == (name in dtype.reduces), name


def test_where_torch_hides_its_tensors_all_calls_go_the_slow_path(tmp_path):
    script = tmp_path / "one.py"
    script.write_text("""
import sys
import torch, torch.distributed as dist
del torch.Tensor.__dlpack_c_exchange_api__
dist.init_process_group("custom", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
from c10d_custom import native
from c10d_custom.native import direct
group = dist.group.WORLD
assert direct.collective(native.lib.c10d_fast_collective, 1, 0, 1) is None and direct.message(1, 1) is None
assert group._transport.fast_collective is None and group._transport.fast_message is None
t = torch.arange(4.0)
dist.all_reduce(t)
dist.broadcast(t, 0)
dist.all_gather([t], t.clone())
first, second = torch.zeros(4), torch.zeros(4)
pending = dist.irecv(first, 0)
assert not pending.is_completed()
dist.isend(t, 0).wait(), pending.wait()
dist.isend(t + 1, 0).wait()
there = dist.irecv(second, 0)
assert there.is_completed() and there.is_success() and there.source_rank() == 0 and there.result()[0] is second
assert there.get_future().wait()[0].equal(t + 1) and first.equal(t) and second.equal(t + 1)
print(t.tolist())
dist.destroy_process_group()
""")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("[0.0, 1.0, 2.0, 3.0]\n", 0), done.stderr


def test_the_fast_calls_are_there():
    from functools import partial

    from c10d_custom import native
    from c10d_custom.native import _fast, direct

    assert isinstance(native.inside, partial)
    assert direct.CoreTicket is _fast.CoreTicket
    assert isinstance(direct.collective(native.lib.c10d_fast_collective, 1, 0, 1), _fast.FastCollective)
    assert direct.message(1, 1) is not None


def test_every_torch_dtype_with_storage_is_known():
    every = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    missing = {str(d).removeprefix("torch.") for d in every - dtypes.BY_DTYPE.keys()}
    # int1 to int7 and uint1 to uint7 are shells without arithmetic or copies.
    missing = {m for m in missing if not re.fullmatch(r"u?int[1-7]", m)}
    assert not missing, f"torch {torch.__version__} has them, dtypes.py does not: docs/CONTRIBUTING.md, Add a dtype"


def test_the_core_has_every_function_that_is_bound_and_every_one_that_is_called_is_bound():
    from c10d_custom.native.over_hosts import lib as core

    for name in core.signatures:
        assert getattr(core, f"c10d_{name}").argtypes is not None, name
    sources = "".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    called = set(re.findall(r"\blib\.c10d_(\w+)", sources))
    assert called and called <= core.signatures.keys()


def test_gloo_supports_nothing_that_we_do_not():
    supports = json.loads((ROOT / "tests" / "gloo_support.json").read_text())["supports"]
    by_name = dict(dtypes.TABLE)
    unmeasured = {name for name, reduces in by_name.items() if reduces} - set(supports["broadcast"])
    assert not unmeasured, f"{unmeasured}: run scripts/measure_support.py for gloo, on the newest torch"
    for operation, answers in supports.items():
        for name, works in answers.items():
            if works and operation.startswith("all_reduce "):
                assert operation.split()[1] in by_name[name], (operation, name)
            elif works:
                assert name in by_name


@pytest.mark.parametrize("text", ["0", "12k", "-5", "99999999999"])
def test_a_bad_environment_variable_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv("C10D_CUSTOM_WINDOW", text)
    with pytest.raises(ValueError, match="C10D_CUSTOM_WINDOW"):
        config.Config.from_env()


LINES = 600  # of a file, which holds one concept
LONGER = {"backend/shm/p2p.cpp": 700}  # one class, whose two halves call each other


def test_no_file_is_long():
    files = [f for folder in ("backend", "python", "tests", "scripts") for f in (ROOT / folder).rglob("*")]
    code = [f for f in files if f.suffix in {".py", ".c", ".cpp", ".h", ".inc"} and "build" not in f.parts]
    assert len(code) > 500
    names = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in code}
    assert {name: n for name, n in names.items() if n > LONGER.get(name, LINES)} == {}


def test_the_tested_torches_are_those_that_are_recorded():
    records = json.loads((ROOT / "tests" / "torch_api" / "versions.json").read_text())
    tested = sorted(tuple(map(int, r["torch"].split(".")[:2])) for r in records if not r["failed"])
    assert [tuple(map(int, v.split("."))) for v in _version.TESTED_TORCH] == [tested[0], tested[-1]]


def test_version_is_the_distribution_s():
    from importlib.metadata import version

    assert version("c10d-custom") == c10d_custom.__version__
