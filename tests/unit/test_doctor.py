"""``python -m c10d_custom doctor``: right on this machine, and on machines that lack something."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from c10d_custom import native
from c10d_custom.creation import started
from c10d_custom.doctor import command, finding, gpus, memory, mpi, self_test, settings, software
from c10d_custom.doctor.finding import Finding, State
from c10d_custom.launch import mpich_files

pytestmark = pytest.mark.lane2

ASK = "import sys; sys.argv = ['c10d_custom', 'doctor', *{!r}]; from c10d_custom.__main__ import main; sys.exit(main())"

# Refuses a system call to this process and to those it starts, with EPERM.
SECCOMP = """
import ctypes, struct
steps = [(0x20, 0, 0, 4), (0x15, 0, 3, 0xc000003e), (0x20, 0, 0, 0), (0x15, 0, 1, {}), (6, 0, 0, 0x50001),
         (6, 0, 0, 0x7fff0000)]
filter = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *s) for s in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(filter)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    print("no filter:", ctypes.get_errno())
    raise SystemExit(77)
"""

# Nothing of what Python code opens or asks for in /proc is there.
NO_PROC = """
import builtins, io, os, torch
def without_proc(real):
    def called(path, *rest, **more):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *rest, **more)
    return called
builtins.open = io.open = without_proc(open)
os.stat = without_proc(os.stat)
"""


def ask(*arguments, before="", wrapper=(), **env):
    """(exit status, what it printed)"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("C10D_CUSTOM_")}
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", f"{before}\n{ASK.format(arguments)}"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**clean, **env},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def found(*arguments, **more):
    """(exit status, {name: what is said of it})"""
    status, text = ask("--json", *arguments, **more)
    if status == 77:
        pytest.skip(f"seccomp filters cannot be installed here ({text.strip()})")
    said = json.loads(text)
    assert said["status"] == status == max(State[f["state"].upper()] for f in said["findings"])
    return status, {f["name"]: f for f in said["findings"]}


def test_what_it_says_of_this_machine(tmp_path):
    status, said = found(TMPDIR=str(tmp_path))
    assert list(said) == [name for name, _ in command.CHECKS] + ["self-test"]
    assert said["torch"]["facts"]["torch"] == torch.__version__
    assert said["host"]["facts"]["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert said["host"]["facts"]["network_namespace"] == os.stat("/proc/self/ns/net").st_ino
    assert set(said["sharing"]["facts"]["asked"].values()) == {"works"}
    assert (said["MPI"]["facts"]["mpi4py"] is None) == (find_spec("mpi4py") is None)
    assert said["self-test"]["state"] == "fine" and said["self-test"]["facts"]["failure"] is None
    assert status < State.FAILS
    assert not list(tmp_path.glob("c10d_custom*")), "nothing is left"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of other processors are not known here")
def test_the_reductions_are_those_for_this_processor():
    flags = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")).split()
    v3 = {"avx", "avx2", "f16c"} <= set(flags)
    v4 = v3 and {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= set(flags)
    wanted = "x86-64-v4" if v4 else "x86-64-v3" if v3 else "baseline"
    assert native.lib.c10d_reduce_variant().decode() == wanted


def test_the_text_is_one_screen():
    status, text = ask("--no-self-test")
    lines = text.splitlines()
    assert len(lines) <= finding.LINES and max(map(len, lines)) <= finding.COLUMNS
    assert "self-test" not in text and [line for line in lines if line[2:].startswith("torch")]
    long = [Finding(name, "many words " * 200, State.REMARK) for name, _ in [*command.CHECKS, command.SELF_TEST]]
    lines = finding.text(long).splitlines()
    assert len(lines) <= finding.LINES and max(map(len, lines)) <= finding.COLUMNS


def test_without_mpi4py():
    _, said = found("--no-self-test", before="import sys; sys.modules['mpi4py'] = None")
    assert said["MPI"]["state"] == "fine" and "no mpi4py: one host only" in said["MPI"]["text"]


def test_without_the_core():
    status, said = found("--no-self-test", before="import sys; sys.modules['c10d_custom.native'] = None")
    assert said["core"]["state"] == "fails" and "does not load" in said["core"]["text"] and status == 2


def test_without_proc():
    status, said = found("--no-self-test", before=NO_PROC)
    assert said["host"]["state"] == "fails" and "boot id" in said["host"]["text"] and status == 2
    assert said["sharing"]["state"] == "remark" and "/proc" in said["sharing"]["text"]


def test_where_proc_is_an_empty_folder():
    alone = ("unshare", "--user", "--map-root-user", "--mount")
    hide = ("sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
    if not shutil.which("unshare") or subprocess.run([*alone, *hide, "true"], capture_output=True).returncode:
        pytest.skip("/proc cannot be hidden here")
    status, said = found(wrapper=(*alone, *hide))
    assert said["host"]["state"] == said["self-test"]["state"] == "fails" and status == 2
    assert said["memory"]["state"] == "remark" and "without /proc" in said["memory"]["text"]
    assert "boot id" in said["self-test"]["text"] and "c10d_custom doctor" in said["self-test"]["text"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are x86-64's")
@pytest.mark.parametrize(
    "call, number, state, group",
    [
        ("memfd_create", 319, "remark", "fine"),
        ("ftruncate", 77, "fine", "fails"),
        ("pidfd_open", 434, "remark", "fine"),
        ("pidfd_getfd", 438, "fine", "fine"),  # not used
    ],
)
def test_under_a_filter_of_system_calls(call, number, state, group):
    status, said = found(before=SECCOMP.format(number))
    assert (said["sharing"]["state"], said["self-test"]["state"]) == (state, group)
    assert status >= max(State[state.upper()], State[group.upper()])
    if state != "fine":
        assert f"{call} (Operation not permitted)" in said["sharing"]["text"]
        assert "A seccomp filter is on this process" in said["sharing"]["text"]
    if group == "fails":
        assert "rank 0 cannot create shared memory: [Errno 1] ftruncate" in said["self-test"]["text"]
        assert "(python -m c10d_custom doctor shows what this machine allows)" in said["self-test"]["text"]


def test_settings():
    status, said = found("--no-self-test", C10D_CUSTOM_WINDOW="4", C10D_CUSTOM_REPLACES="gloo")
    assert said["settings"]["state"] == "fine" and "C10D_CUSTOM_WINDOW=4" in said["settings"]["text"]
    assert said["replaces"]["facts"]["replaced"] == ["gloo"]
    status, said = found("--no-self-test", C10D_CUSTOM_WIDOW="4")
    assert status == 1 and "C10D_CUSTOM_WIDOW is no variable" in said["settings"]["text"]


def test_settings_that_no_group_can_be_made_with():
    """All are named; the ranks go without, and show that it is only these."""
    status, said = found(C10D_CUSTOM_WINDOW="0", C10D_CUSTOM_CELLS="many", C10D_CUSTOM_TRACE_SIGNAL="10")
    assert (status, said["settings"]["state"], said["self-test"]["state"]) == (2, "fails", "fine")
    assert set(said["settings"]["facts"]["invalid"]) == {
        "C10D_CUSTOM_WINDOW",
        "C10D_CUSTOM_CELLS",
        "C10D_CUSTOM_TRACE_SIGNAL",
    }
    assert settings.refused({"C10D_CUSTOM_WINDOW": "4"}) == {}


@pytest.mark.parametrize(
    "tested, state", [(("2.0", "2.1"), State.REMARK), (("98.0", "99.0"), State.FAILS), (("2.0", "99.0"), State.FINE)]
)
def test_the_version_of_torch(monkeypatch, tested, state):
    monkeypatch.setattr(software, "TESTED_TORCH", tested)
    assert software.torch().state is state


@pytest.mark.parametrize("free, state", [(1 << 20, State.FAILS), (5 << 20, State.REMARK), (1 << 34, State.FINE)])
def test_memory(monkeypatch, free, state):
    monkeypatch.setattr(native, "memory_left", lambda: (free, "the cgroup /here"))
    said = memory.memory()
    assert said.state is state and "left, of the cgroup /here" in said.text


@pytest.mark.parametrize(
    "names, reach, there, state, words",
    [
        (["A"], True, True, State.FINE, "A; ranks share it: mode shared"),
        (["A", "A"], True, True, State.FINE, "2 x A; mode p2p"),
        (["A", "B"], False, True, State.FINE, "A, B; the first cannot read"),
        (["A"], True, False, State.REMARK, "CUDA tensors need cupy and cuda-bindings"),
    ],
)
def test_gpus(monkeypatch, names, reach, there, state, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: reach)
    monkeypatch.setattr(gpus, "there", lambda *_: "1.0" if there else None)
    said = gpus.gpus()
    assert said.state is state and words in said.text


def test_mpi_libraries_and_launchers(monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert "started by Open MPI" in mpi.mpi().text
    monkeypatch.setattr(mpi, "_library", lambda: (None, "no such file"))
    assert mpi.mpi().state is State.FAILS
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    assert mpi.mpi().state is State.REMARK


@pytest.mark.parametrize(
    "library, left, state, words",
    [
        ("MPICH 5.0.2", 0.1, State.REMARK, "has 0.1 MB left, and MPICH takes 1.1"),
        ("Intel(R) MPI Library 2021.18", 0.1, State.REMARK, "has 0.1 MB left, and Intel MPI takes 0.1"),
        ("MPICH 5.0.2", 1e4, State.FINE, "10000 left"),
    ],
)
def test_room_for_mpi(monkeypatch, library, left, state, words):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(mpi, "_library", lambda: (library, ""))
    monkeypatch.setattr(mpich_files, "megabytes", lambda: (left, left))
    said = mpi.mpi()
    assert said.state is state and words in said.text and said.facts["dev_shm_megabytes"] == left


def test_a_check_that_raises_is_a_remark():
    (said,) = command.look([("x", lambda: 1 // 0)])
    assert said.state is State.REMARK and "ZeroDivisionError" in said.text


@pytest.mark.parametrize("first", ["raise SystemExit('it is over')", "time.sleep(60)"])
def test_the_self_test_ends_and_leaves_nobody(monkeypatch, tmp_path, first):
    """One rank fails, or none ever ends."""
    monkeypatch.setattr(self_test, "_GRACE", 1.0)
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); "

    def rank_of(folder, number):
        return [sys.executable, "-c", code + ("time.sleep(60)" if number else first), str(folder / f"pid{number}")]

    began = time.monotonic()
    failure = self_test._run(tmp_path, began + 4, rank_of)
    assert time.monotonic() - began < 10
    wanted = "rank 0 did not come to an end" if "sleep" in first else "rank 0 ended with status 1: it is over"
    assert failure.startswith(wanted)
    assert [started(int((tmp_path / f"pid{number}").read_text())) for number in (0, 1)] == [None, None]


def test_the_self_test_compares_values():
    with pytest.raises(ValueError, match="all_reduce gave other values"):
        self_test._expect(torch.ones(2), torch.zeros(2), "all_reduce")


def test_the_ranks_of_the_self_test_know_of_no_launcher(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "C10D_CUSTOM_TRACE_DIR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("C10D_CUSTOM_WINDOW", "4")
    passed = self_test.environment()
    assert "RANK" not in passed and "PMI_RANK" not in passed and "MASTER_ADDR" not in passed
    assert "C10D_CUSTOM_TRACE_DIR" not in passed and passed["C10D_CUSTOM_WINDOW"] == "4"
