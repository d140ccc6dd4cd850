"""For PyInstaller, which asks its entry point where hooks are. Apart from the package, which imports torch."""

import os


def hook_dirs() -> list[str]:
    return [os.path.dirname(__file__)]
