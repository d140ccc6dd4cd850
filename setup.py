"""Compiles the native core (backend, C++17, no dependencies) into c10d_custom/native/_shm.so, a fast way for Python to
call it into c10d_custom/native/_fast.so, and packs the sources of the CUDA kernels, compiled where they are used, as
c10d_custom/native/cuda, and what names all of this, as c10d_custom/revision."""

import hashlib
import os
import re
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CCompilerError, ExecError, PlatformError

from build_backend import compilers


class build_native(build_ext):
    def get_ext_filename(self, fullname):
        # Plain shared libraries that fit every Python: one has a C ABI and is opened with ctypes, one has Python's
        # stable ABI.
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext):
        return []

    def build_extensions(self):
        # Not the flags that this Python was built with, which are another compiler's, or another processor's.
        c, cxx = compilers()
        flags, link = os.environ.get("CFLAGS", ""), os.environ.get("LDFLAGS", "")
        self.compiler.set_executables(
            compiler=c,
            compiler_cxx=cxx,
            linker_exe=c,
            linker_exe_cxx=cxx,
            compiler_so=f"{c} -fPIC -DNDEBUG {flags}",
            compiler_so_cxx=f"{cxx} -fPIC -DNDEBUG {flags}",
            linker_so=f"{c} -shared {link}",
            linker_so_cxx=f"{cxx} -shared {link}",
        )
        super().build_extensions()

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError) as error:
            raise SystemExit(
                f"c10d-custom: its native core did not compile ({error}).\n"
                "It needs Linux (x86-64 or aarch64) and a compiler of C++17: g++ >= 9, clang >= 10, or, with neither "
                "CC nor CXX set and none found, the package ziglang, which pip then fetches by itself."
            ) from error


class build_with_cuda_sources(build_py):
    def remove_earlier_builds(self):
        """What they left where the wheel is packed: modules that are gone since are not to be in it. The compiled parts
        stay, which build_ext compares with their sources."""
        built = {Path(self.build_lib, f"{e.name.replace('.', '/')}.so") for e in self.distribution.ext_modules}
        for path in Path(self.build_lib).rglob("*"):
            if path.is_file() and path not in built:
                path.unlink()

    def run(self):
        self.remove_earlier_builds()
        super().run()
        if not self.editable_mode:  # there the package finds them in the checkout
            target = Path(self.build_lib, "c10d_custom", "native", "cuda")
            self.mkpath(str(target))
            for source in sorted(glob("backend/cuda/*.h")):
                self.copy_file(source, str(target))
            Path(self.build_lib, "c10d_custom", "revision").write_text(self.revision())

    def revision(self):
        """Of the sources, whatever they are compiled with: ranks of different ones cannot be of one group
        (c10d_custom/_version.py)."""
        digest = hashlib.sha256()
        native = {name for ext in self.distribution.ext_modules for name in (*ext.sources, *ext.depends)}
        for path in sorted({*glob("python/c10d_custom/**/*.py", recursive=True), *native}):
            digest.update(f"{path}\0".encode() + Path(path).read_bytes())
        return digest.hexdigest()[:12]


CORE = "shm", "hosts", "launch"
FLAGS = dict(re.findall(r"^(\w+) = (.*)$", Path("backend/flags.mk").read_text(), re.M))

setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for this Python and all later ones
    cmdclass={"build_ext": build_native, "build_py": build_with_cuda_sources},
    ext_modules=[
        Extension(
            "c10d_custom.native._shm",
            sources=sorted(path for folder in CORE for path in glob(f"backend/{folder}/*.cpp")),
            depends=[path for folder in CORE for kind in ("h", "inc") for path in glob(f"backend/{folder}/*.{kind}")],
            language="c++",
            extra_compile_args=[*FLAGS["FLAGS"].split(), *FLAGS["OPT"].split()],
            # Of a standard library that is linked in, what is used alone: all of it can wait for a time of day.
            extra_link_args=["-pthread", "-s", "-Wl,--gc-sections"],
        ),
        Extension(
            "c10d_custom.native._fast",
            sources=sorted(glob("backend/python/*.c")),
            depends=glob("backend/python/*.h"),
            extra_compile_args=["-O2", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"],
            extra_link_args=["-s"],
            py_limited_api=True,
        ),
    ],
)
