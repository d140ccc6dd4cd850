"""Copied into the site-packages of the tests' environments, where a .pth file imports it at the start of each Python:
no garbage is collected while torch is imported, or its compiler, which makes objects and hardly any garbage; and none
is looked for among torch's objects later, as each Python otherwise does when it ends. Tests start a thousand processes;
one that imports torch and ends takes a quarter less."""

import gc
import sys
from importlib.machinery import PathFinder

LARGE = ["torch", "torch._dynamo"]


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in LARGE:
            return None
        LARGE.remove(name)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                collects = gc.isenabled()
                gc.disable()
                try:
                    run(module)
                finally:
                    if collects:
                        gc.enable()
                    if name == "torch":  # triton, which the compiler imports, complains of what is not collected
                        gc.freeze()

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
