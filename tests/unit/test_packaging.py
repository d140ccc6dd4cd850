"""What the package is built with: the declarations of Python's limited API against Python's own, and the choice of a
compiler. scripts/wheels --test builds and tests the wheels."""

import importlib.metadata
import importlib.util
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ROOT / "backend" / "python" / "python_abi.h"
THEIRS = Path(sysconfig.get_path("include"), "Python.h")
# Of a Python without the global interpreter lock, which has no limited API before 3.15, the whole one.
WITHOUT_LOCK = ["-DPy_GIL_DISABLED"] if sysconfig.get_config_var("Py_GIL_DISABLED") else []
LIMITED = [*([] if WITHOUT_LOCK else ["#define Py_LIMITED_API 0x030b0000"]), "#include <Python.h>"]

pytestmark = pytest.mark.skipif(
    not OURS.exists() or not THEIRS.exists(), reason="needs a checkout, and Python's headers (python3-dev)"
)


def compiled(path: Path, lines: list[str], *options: str) -> Path:
    source = path.with_suffix(".c")
    source.write_text("\n".join([*lines, ""]))
    command = ["g++" if path.suffix == ".cpp" else "gcc", "-w", "-Werror=incompatible-pointer-types", *options]
    done = subprocess.run([*command, source, "-o", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


def test_declarations_are_pythons_own(tmp_path):
    """A second declaration of another type is an error in C."""
    text = OURS.read_text()
    declared = re.findall(r"(?m)^(?:extern )?[\w ]+[ *]+\w+(?:\(.*\)|, .*);$", text)
    # None, True and False: only their addresses are used, and Python's own type for two of them is another struct.
    declared = [line for line in declared if not line.startswith("typedef") and "Struct" not in line]
    assert len(declared) > 35 and any("PyModule_Create2" in line for line in declared)
    include = f"-I{THEIRS.parent}"
    compiled(tmp_path / "same.o", [*LIMITED, *declared], include, "-c")
    with pytest.raises(AssertionError, match="conflicting types"):
        wrong = [line.replace("PyList_Size(PyObject*)", "PyList_Size(int)") for line in declared]
        compiled(tmp_path / "other.o", [*LIMITED, *wrong], include, "-c")


def test_constants_and_structs_are_pythons_own(tmp_path):
    constants = re.findall(r"\b((?:METH|Py_tp|Py_TPFLAGS)_\w+) =", OURS.read_text())
    structs = {"PyObject": "PyObject", "PyMethodDef": "PyMethodDef", "PyModuleDef": "struct PyModuleDef"}
    structs |= {"PyType_Slot": "PyType_Slot", "PyType_Spec": "PyType_Spec"}
    values = [*constants, *(f"sizeof({struct})" for struct in structs.values())]
    main = [
        "#include <stdio.h>",
        "int main(void) {",
        *(f'  printf("{value} %lld\\n", (long long)({value}));' for value in values),
        "}",
    ]
    assert len(constants) >= 9

    def printed(name, lines, *options):
        return subprocess.run(
            [compiled(tmp_path / name, [*lines, *main], *options)], capture_output=True, text=True
        ).stdout

    ours = printed("ours.bin", [f'#include "{OURS}"'], *WITHOUT_LOCK)
    theirs = printed("theirs.bin", LIMITED, f"-I{THEIRS.parent}")
    assert ours.count("\n") == len(values) and ours == theirs


def build_backend():
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    (folder,) = named["backend-path"]
    spec = importlib.util.spec_from_file_location(
        named["build-backend"], ROOT / folder / f"{named['build-backend']}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine("gcc", "g++", CXX="icpx"): programs on the PATH, and the environment."""

    def has(*programs, **environment):
        for program in programs:
            (tmp_path / program).write_text("#!/bin/sh\n")
            (tmp_path / program).chmod(0o700)
        monkeypatch.setenv("PATH", str(tmp_path))
        for name in ("CC", "CXX"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        backend = build_backend()
        # setuptools' own runs setup.py, which finds this module where a build put it.
        monkeypatch.setattr(backend.build_meta, "get_requires_for_build_wheel", lambda settings: [])
        return backend

    return has


def test_compilers_of_the_machine(machine, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: {"CC": "cc-of-python -pthread"}.get(name))
    backend = machine("gcc", "clang", "g++", "clang++")
    assert backend.compilers() == ("gcc", "g++")
    assert "ziglang" not in backend.get_requires_for_build_wheel()
    assert machine("cc-of-python").compilers() == ("cc-of-python -pthread", "g++")
    assert machine(CC="my-cc -m64", CXX="my-cxx").compilers() == ("my-cc -m64", "my-cxx")


@pytest.mark.parametrize("there", [(), ("gcc",), ("g++",)])
def test_zig_where_one_is_missing(machine, there):
    backend = machine(*there)
    for command in backend.compilers():
        assert command.startswith(sys.executable) and " -m ziglang c" in command and "-linux-gnu.2.28" in command
    assert "ziglang" in backend.get_requires_for_build_wheel()
    assert "ziglang" in backend.get_requires_for_build_editable()


def test_a_module_that_is_gone_is_not_packed_from_an_earlier_build(tmp_path):
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("scripts", "backend/cuda", "python"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "backend" / "flags.mk", tmp_path / "backend")
    package, built = tmp_path / "python" / "c10d_custom", tmp_path / "built" / "c10d_custom"
    gone = ["gone.py", "gone/__init__.py", "native/gone.pyi"]
    for name in gone:
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("")

    def build():
        command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "built"]
        environment = {**os.environ, "PYTHONPATH": "scripts"}  # as a build has it
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    build()
    assert all((built / name).exists() for name in gone)
    compiled = built / "native" / "_shm.so"  # which build_ext has put there, and compares with its sources
    compiled.write_text("")
    for name in gone:
        (package / name).unlink()
    (package / "gone").rmdir()
    build()
    assert not any((built / name).exists() for name in gone) and compiled.exists()
    assert (built / "native" / "cuda").is_dir() and (built / "call.py").exists()


@pytest.mark.parametrize("version", ["65.5.0", None])
def test_an_old_setuptools_is_told_which_one_is_needed(tmp_path, version):
    """As `pip install --no-build-isolation` finds it."""
    found = "none" if version is None else version
    code = f'__version__ = "{version}"' if version else 'raise ModuleNotFoundError("setuptools")'
    (tmp_path / "setuptools.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-c", "import build_backend"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"built with setuptools>=77, and {sys.executable} has {found}: pip install" in done.stderr


def test_the_demo_shows_and_checks_its_options_before_it_installs_anything(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "C10D_VENV": f"../../{tmp_path}", "C10D_INSTALLER": "none"}

    def demo(*options):
        return subprocess.run(
            ["bash", ROOT / "scripts" / "demo", *options], env=environment, capture_output=True, text=True, timeout=60
        )

    shown, refused = demo("--help"), demo("--ranks", "1")
    assert shown.returncode == 0 and "--ranks RANKS" in shown.stdout and not shown.stderr
    assert refused.returncode == 2 and "--ranks must be at least 2" in refused.stderr
    assert not any(tmp_path.iterdir()) and "Installing" not in shown.stdout + refused.stdout


def test_pyinstaller_is_told_all_that_a_bundle_needs(tmp_path, monkeypatch):
    """By its own rules: the folder that the entry point names has a hook, whose lists together are the package."""
    (point,) = importlib.metadata.entry_points(
        group="pyinstaller40", name="hook-dirs", module="_c10d_custom_pyinstaller"
    )
    (hook,) = Path(point.load()()[0]).glob("hook-c10d_custom.py")
    folder = Path(importlib.util.find_spec("c10d_custom").origin).parent
    asked = types.ModuleType("PyInstaller.utils.hooks")
    asked.collect_submodules = lambda name: [
        name,
        *(m.name for m in pkgutil.walk_packages([str(folder)], f"{name}.", onerror=lambda name: None)),
    ]
    asked.collect_dynamic_libs = lambda name: [(path, path.relative_to(folder.parent)) for path in folder.rglob("*.so")]
    asked.copy_metadata = lambda name: [(importlib.metadata.distribution(name)._path, "metadata.dist-info")]
    for name in ("PyInstaller", "PyInstaller.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, asked.__name__, asked)
    said = runpy.run_path(str(hook))
    sources = [folder.parent.joinpath(*name.split(".")) for name in said["hiddenimports"]]
    sources = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in sources]
    for path, to in [
        *((path, path.relative_to(folder.parent)) for path in sources if path.exists()),
        *said["binaries"],
    ]:
        (tmp_path / to).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / to)
    for path, to in said["datas"]:
        shutil.copytree(path, tmp_path / to)
    code = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('custom', rank=0, world_size=1, store=dist.HashStore())\n"
        "import c10d_custom, c10d_custom.native as native\n"
        "print(c10d_custom.__file__, native.lib._name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert all(path.startswith(str(tmp_path)) for path in done.stdout.split()) and done.stdout, done.stderr
