"""Builds this checkout's package into a folder of its own, unless it is there: python -m gpu.check.set_up FOLDER DEVICE

Nothing is fetched, and the Python at hand is not changed: it must have what FOR has."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOR = {"cpu": ("torch", "numpy", "pytest", "pytest_timeout", "setuptools")}
FOR["simulated"] = FOR["cpu"]
FOR["cuda"] = (*FOR["cpu"], "cupy", "cuda.bindings")
AGE = 3600  # seconds after which what was built of other sources goes


def there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def main(folder, device):
    if missing := [module for module in FOR[device] if not there(module)]:
        print(f"SUMMARY: {sys.executable} lacks {', '.join(missing)}: name another Python (PYTHON=...), or install it")
        return 1
    site = Path(folder)
    if (site / "c10d_custom").is_dir():
        print(f"SUMMARY: built before, in {site.parent.name}/{site.name}")
        return 0
    before = [path for path in site.parent.glob("gpu-check-*") if time.time() - path.stat().st_mtime > AGE]
    # setuptools would pack modules that have been deleted since.
    for path in (*before, *(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*")):
        shutil.rmtree(path, ignore_errors=True)
    part = site.with_name(f"{site.name}.part{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    built = subprocess.run([*pip, "--no-build-isolation", "--no-index", "--target", str(part), str(ROOT)])
    if built.returncode:
        print("SUMMARY: the package could not be built here")
        return 1
    shutil.rmtree(site, ignore_errors=True)
    part.rename(site)
    print(f"SUMMARY: built in {site.parent.name}/{site.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
