"""Copied into the site-packages of the tests' environments, where a .pth file imports it at the start of each Python:
no garbage is collected while torch is imported, which makes objects and hardly any garbage. Tests start a thousand
processes, and an import takes an eighth less."""

import gc
import sys
from importlib.machinery import PathFinder


class TorchFinder:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                gc.disable()
                try:
                    run(module)
                finally:
                    gc.enable()

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, TorchFinder())
