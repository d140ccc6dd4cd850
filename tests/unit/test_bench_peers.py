"""Other libraries in the benchmark: what is missing is said and left out, what is there is timed and checked."""

import importlib.util
import json
import os
import re
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch.distributed as dist

from c10d_custom.bench.operations import OPERATIONS
from unit.bench_cases import MPIEXEC, OWN_BENCH, QUICK, bench, case, mpi, rows, run

pytestmark = pytest.mark.lane3

SWEEP = [*OWN_BENCH, "sweep"]  # bench, with more to compare with
PREFIX = sysconfig.get_path("data")

# What DeepSpeed offers, by gloo: the benchmark's side of it is what is tested. It leaves a file as DeepSpeed does.
FAKE = {
    "__init__.py": "",
    "ops/__init__.py": "",
    "ops/op_builder/__init__.py": "",
    "ops/op_builder/cpu.py": """
class ShareMemCommBuilder:
    def load(self):
        print("compiling")
""",
    "comm/__init__.py": """
from .comm import inference_all_reduce, init_distributed
""",
    "comm/comm.py": """
import os
import types
import torch.distributed as dist

cdb = types.SimpleNamespace(shm_vector_kernel_level=1)

def init_distributed(dist_backend):
    global gloo
    assert os.environ["LOCAL_SIZE"] == str(dist.get_world_size())
    gloo = dist.new_group(backend=dist_backend)
    job = f'{os.environ["MASTER_ADDR"]}_{os.environ["MASTER_PORT"]}'
    open(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{job}_{dist.get_rank()}", "w").close()

def inference_all_reduce(tensor):
    assert "LOCAL_SIZE" not in os.environ
    dist.all_reduce(tensor, group=gloo)
""",
}


@pytest.fixture
def deepspeed(tmp_path):
    for name, text in FAKE.items():
        (file := tmp_path / "deepspeed" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return {"PYTHONPATH": str(tmp_path)}


def small(*options, **env):
    return run([*SWEEP, "-r", "2", "-b", "4", "-e", "1K", "-f", "256", *options, *QUICK], **env)


def test_what_cannot_be_had_is_one_line_and_the_rest_is_timed(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise ImportError('there is none')")
    file = tmp_path / "run.json"
    options = ("--against", "mpi,deepspeed,oneccl,ucc,gloo", "--json", str(file))
    out = small(*options, PYTHONPATH=str(tmp_path))
    assert out.returncode == 0, out.stderr
    missing = {"mpi": "mpirun -n 2", "deepspeed": "pip install deepspeed ninja", "oneccl": "pip install 'oneccl"}
    if not dist.is_backend_available("ucc"):
        missing["ucc"] = "USE_UCC=1"
    said = dict(re.findall(r"^(\w+) is not timed: (.*)$", out.stdout, re.M))
    assert said == json.loads(file.read_text())["missing"] and said.keys() == missing.keys()
    assert all(what in said[name] for name, what in missing.items())
    table = [row for row in rows(out.stdout) if row["backend"] != "ucc"]
    assert [row["backend"] for row in table] == ["custom", "gloo"] * 2
    assert "x gloo" in out.stdout or "ucc" not in missing  # the first that could be had


@mpi
def test_oneccl_without_its_library_is_one_line(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libccl.so.2").write_text("no library")
    out = run([MPIEXEC, "-n", "2", *SWEEP, "-e", "4", *QUICK, "--against", "oneccl,gloo"], CCL_ROOT=str(tmp_path))
    assert out.returncode == 0, out.stderr
    assert "oneccl is not timed: oneCCL needs its libraries (pip install 'oneccl" in out.stdout
    assert [row["backend"] for row in rows(out.stdout)] == ["custom", "gloo"]


def test_deepspeeds_op_is_timed_and_checked_where_it_can_be_used(deepspeed):
    before = set(os.listdir("/dev/shm"))
    out = small("all_reduce,broadcast", "-c", "--against", "deepspeed", **deepspeed)
    assert out.returncode == 0, out.stderr
    assert [(row["backend"], row["#wrong"]) for row in rows(out.stdout)] == [
        ("custom", "0"),
        ("deepspeed", "0"),
    ] * 2 + [("custom", "0")] * 2
    assert "deepspeed is not timed: DeepSpeed's op is a synchronous all_reduce that sums" in out.stdout
    assert "compiling" not in out.stdout
    assert not [f for f in os.listdir("/dev/shm") if f.startswith("deepspeed_allreduce") and f not in before]


ONE_FUNCTION = pytest.mark.full("one function says it, as of bfloat16")


@pytest.mark.parametrize(
    "options, why",
    [
        pytest.param(["-o", "max"], "that sums", marks=ONE_FUNCTION),
        pytest.param(["--async"], "synchronous", marks=ONE_FUNCTION),
        pytest.param(["-d", "int32"], "takes no int32", marks=ONE_FUNCTION),
        (["-d", "bfloat16"], "no op for bfloat16 on this processor"),  # DeepSpeed would call us
    ],
)
def test_what_deepspeeds_op_is_not_for_is_said(deepspeed, options, why):
    out = small("--against", "deepspeed", *options, **deepspeed)
    assert out.returncode == 0, out.stderr
    assert re.search(f"^deepspeed is not timed: .*{why}", out.stdout, re.M)
    assert {row["backend"] for row in rows(out.stdout)} == {"custom"}


def test_a_size_that_a_reference_does_not_know_is_left_out(monkeypatch, capsys):
    from c10d_custom.bench import sweep, timing
    from c10d_custom.bench.case import Unavailable

    class Small:
        checked, repeats = False, lambda self, case: 1

        def barrier(self):
            pass

        def bind(self, case, buffers):
            if case.nbytes > 4:
                raise Unavailable("too large")
            return lambda: None

    class Any(Small):
        def bind(self, case, buffers):
            return lambda: None

    monkeypatch.setattr(sweep, "times", lambda timed, plan: {name: [1.0] for name in timed})
    plan = timing.Plan()
    todo = sweep.Sweep(("all_reduce",), (4, 8), None, "sum", 0, False, (), None, False, 0, plan, None, None)
    usable = {"custom": Any(), "small": Small()}
    for count, names in ((1, ["custom", "small"]), (2, ["custom"])):
        results = sweep._of_size(todo, case("all_reduce", 0, 2, count), usable, print)
        assert [r["reference"] for r in results] == names
    assert capsys.readouterr().out == "small is not timed at 8 bytes: too large\n"


def test_threads_are_timed_beside_each_other():
    out = bench("-r", "2", "-b", "1M", "-e", "2M", "-f", "2", "-c", "--threads", "1,2", *QUICK)
    assert out.returncode == 0, out.stderr
    assert "x threads1" in out.stdout
    names = ["custom", "threads1", "threads2"]
    assert [(row["backend"], row["#wrong"]) for row in rows(out.stdout)] == [(name, "0") for name in names] * 2


# The real ones, where they are installed.


@pytest.mark.skipif(
    not (importlib.util.find_spec("deepspeed") and shutil.which("ninja")), reason="pip install deepspeed ninja"
)
def test_deepspeed():
    out = small("-c", "--against", "deepspeed")
    assert out.returncode == 0, out.stderr
    assert [(row["backend"], row["#wrong"]) for row in rows(out.stdout)] == [("custom", "0"), ("deepspeed", "0")] * 2


@pytest.mark.skipif(not Path(PREFIX, "lib", "libccl.so.2").exists(), reason="pip install 'oneccl<2022.2'")
def test_oneccl():
    command = [f"{PREFIX}/bin/mpiexec", "-n", "2", *SWEEP, "all", "-c", "-b", "4", "-e", "1K", "-f", "256", *QUICK]
    out = run([*command, "--against", "oneccl"], LD_LIBRARY_PATH=f"{PREFIX}/lib")
    assert out.returncode == 0, out.stderr
    table = [row for row in rows(out.stdout) if row["backend"] == "oneccl"]
    assert len(table) >= 2 * (len(OPERATIONS) - 2) and {row["#wrong"] for row in table} == {"0"}
    assert "oneccl is not timed: oneCCL's C API has no gather" in out.stdout
