"""Copied into the site-packages of the tests' environments, where a .pth file imports it at the start of each Python.
Tests start a thousand processes, whose imports of torch are half of what they cost. What few of them need is put off or
left out:

- torch's compiler, which DDP and optimizers import to tell it what it must not compile, until more is asked of it;
- torch's kernels in Python for tensors on "meta", until what computes on such tensors is imported: the compiler,
  DTensor, decompositions of operations;
- NVIDIA's bindings, which torch takes if they are there, for its notes on CUDA graphs;
- the sources, and the paths of all modules, among which torch looks for who registers an operation; compiling what
  `dataclasses` writes;
- garbage collection, while torch or its compiler is imported, which make hardly any; and none is looked for among
  torch's objects later, as each Python otherwise does when it ends;
- the threads of NumPy's linear algebra, which spin before they sleep.

C10D_TEST_WHOLE_TORCH=1 in the environment: all is imported as torch does it."""

import contextlib
import functools
import gc
import marshal
import os
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder


class PutOff:
    """A module that is executed when it is asked for an attribute that it lacks, or when one of `users`, or a module
    within it, is imported. stand_ins: what it has before; at_once: what is done in its place; needs: what is executed
    before it."""

    def __init__(self, name, stand_ins, at_once=lambda: None, users=(), needs=()):
        self.name, self.stand_ins, self.at_once, self.users, self.needs = name, stand_ins, at_once, users, needs
        self.lock = threading.RLock()
        self.module = self.run = None
        self.running = self.done = False

    def find(self, path, target):
        spec = PathFinder.find_spec(self.name, path, target)
        if spec is not None and spec.loader is not None:
            self.run, spec.loader.exec_module = spec.loader.exec_module, self._begin
        return spec

    def wanted_by(self, name):
        waits = self.module is not None and not self.running and not self.done
        return waits and (name in self.users or name.startswith(self.name + "."))

    def _begin(self, module):
        self.at_once()
        self.module = module
        vars(module).update(self.stand_ins, __getattr__=self._get)

    def load(self):
        with self.lock:
            if self.module is None or self.running or self.done:
                return
            self.running = True
            try:
                for module in self.needs:
                    module.load()
                uncollected(self.run)(self.module)
            finally:
                self.running = False
            self.done = True
            vars(self.module).pop("__getattr__", None)

    def _get(self, name):
        with self.lock:
            if self.running or name in {"__path__", "__file__", "__wrapped__"}:
                raise AttributeError(name)
            self.load()
        return getattr(self.module, name)


def uncollected(run):
    def run_uncollected(module):
        collects = gc.isenabled()
        gc.disable()
        try:
            run(module)
        finally:
            if collects:
                gc.enable()

    return run_uncollected


@contextlib.contextmanager
def callers_cheaply():
    """Whoever asks `inspect` for the file and the line, or the module, of a caller gets it without the paths of all
    modules being resolved for that, and without the source being read."""
    import inspect

    frame_info, module_of = inspect.getframeinfo, inspect.getmodule

    def getmodule(thing, _filename=None):
        if inspect.isframe(thing):
            return sys.modules.get(thing.f_globals.get("__name__"))
        return module_of(thing, _filename)

    inspect.getframeinfo, inspect.getmodule = lambda frame, context=1: frame_info(frame, context=0), getmodule
    try:
        yield
    finally:
        inspect.getframeinfo, inspect.getmodule = frame_info, module_of


class Compiled:
    """What `dataclasses` writes for torch's classes, some 700 functions, is compiled once for all processes: code by
    its text, in a file beside this one."""

    path = f"{os.path.splitext(__file__)[0]}.{sys.implementation.cache_tag}.marshal"

    def __init__(self):
        self.by_text, self.is_new = {}, False
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            self.by_text = marshal.load(file)

    def exec(self, text, *namespaces):
        code = self.by_text.get(text)
        if code is None:
            code = self.by_text[text] = compile(text, "<string>", "exec")
            self.is_new = True
        exec(code, *namespaces)

    @contextlib.contextmanager
    def used(self):
        import dataclasses

        dataclasses.exec = self.exec  # found before the one that is built in
        try:
            yield
        finally:
            del dataclasses.exec
        if self.is_new:
            with contextlib.suppress(OSError):  # there may be nobody who may write here
                with open(f"{self.path}.{os.getpid()}", "wb") as file:
                    marshal.dump(self.by_text, file)
                os.replace(file.name, self.path)


def disable(function=None, recursive=True, **options):
    """As torch._dynamo's, which does nothing where nothing is compiled; once the compiler is there, it is asked."""
    if not callable(function):
        compiler.load()
        return compiler.module.disable(function, recursive, **options)

    @functools.wraps(function)
    def call(*arguments, **named):
        if compiler.module.disable is disable:
            return function(*arguments, **named)
        return compiler.module.disable(function, recursive, **options)(*arguments, **named)

    return call


class DDPMode:
    @staticmethod
    def get_optimize_ddp_mode():
        return "ddp_optimizer"  # what torch._dynamo.config says if nobody has set it

    def __getattr__(self, name):
        compiler.load()
        return getattr(compiler.module.utils, name)


def generators():
    """torch.Generator cannot be called (torch 2.15) before torch._prims, which the kernels import, has done this."""
    import torch

    if hasattr(torch._C, "_set_generator_metaclass"):
        try:
            from torch._custom_class_base import CustomClassBaseMeta as Meta
        except ImportError:  # torch before 2.15
            from torch._opaque_base import OpaqueBaseMeta as Meta
        torch._C._set_generator_metaclass(Meta)


meta = PutOff(
    "torch._meta_registrations",
    stand_ins={},
    at_once=generators,
    users=("torch._decomp", "torch._prims", "torch._refs", "torch.distributed.tensor"),
)
compiler = PutOff(
    "torch._dynamo",
    stand_ins={"disable": disable, "graph_break": lambda *_, **__: None, "utils": DDPMode()},
    needs=[meta],
)


class Imported:
    """Loads what is there already: executing what was put off has imported it. Python takes the specification of a
    module that appeared while it was looked for from that module."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__
        vars(module)["__spec__"] = ModuleSpec(self.spec.name, self)  # not by attribute: modules of settings refuse it

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        vars(module)["__spec__"] = self.spec


class Finder:
    has_torch = importing = False

    def find_spec(self, name, path=None, target=None):
        for module in (compiler, meta):
            if name == module.name and module.run is None:
                return module.find(path, target)
            if module.wanted_by(name):
                module.load()
                if name in sys.modules:
                    return vars(Imported(sys.modules[name]).module)["__spec__"]
        if name == "cuda.bindings" and self.importing:
            raise ModuleNotFoundError(f"no module named {name!r} for torch", name=name)
        if name != "torch" or self.has_torch:
            return None
        self.has_torch = True
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = uncollected(spec.loader.exec_module)

            def exec_module(module):
                self.importing = True
                try:
                    with callers_cheaply(), Compiled().used():
                        run(module)
                finally:
                    self.importing = False
                    gc.freeze()

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("C10D_TEST_WHOLE_TORCH") != "1":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.meta_path.insert(0, Finder())
