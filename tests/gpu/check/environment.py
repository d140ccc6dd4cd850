"""Prints what the check runs on: python -m gpu.check.environment --device DEVICE FILE

FILE gets the GPU's name and how many there are. Ends with 1 where torch sees no CUDA device."""

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys


def version(module):
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a broken installation is worth knowing, not worth ending for
        return f"not there ({type(error).__name__}: {str(error).splitlines()[0]})"
    return getattr(found, "__version__", "there, of no version")


def nvidia_smi(*query):
    if not shutil.which("nvidia-smi"):
        return "nvidia-smi is not there"
    try:
        out = subprocess.run(["nvidia-smi", *query], text=True, capture_output=True, timeout=20)
        return (out.stdout or out.stderr).strip()
    except subprocess.TimeoutExpired:
        return "nvidia-smi gave no answer within 20 s"


def cuda_versions():
    try:
        from cuda.bindings import nvrtc
        from cupy.cuda import runtime

        return (
            f"driver {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}, "
            f"NVRTC {'.'.join(map(str, nvrtc.nvrtcVersion()[1:]))}"
        )
    except Exception as error:  # as above
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def first_line(*command):
    try:
        return subprocess.run(command, text=True, capture_output=True, timeout=20).stdout.splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "not there"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("file")
    args = parser.parse_args()
    kind = args.device
    try:
        import torch
    except ImportError as error:
        print(f"python {platform.python_version()} at {sys.executable}: {error}\n{nvidia_smi()}\nSUMMARY: no torch")
        return 1
    facts = {
        "kernel": f"{platform.release()} {platform.machine()}",
        "cores": f"{len(os.sched_getaffinity(0))}, load {os.getloadavg()[0]:.1f}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "c10d_custom": version("c10d_custom"),
        "cupy": version("cupy"),
        "CUDA": cuda_versions(),
        "cuda.bindings": version("cuda.bindings"),
        "mpi4py": version("mpi4py"),
        "g++": first_line("g++", "--version"),
        "MPS": shutil.which("nvidia-cuda-mps-control") or "not there",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version()))
        if torch.cuda.is_available() and torch.distributed.is_nccl_available()
        else "not there",
    }
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with open(f"{args.file}.part", "w") as f:
        json.dump({"device": torch.cuda.get_device_name(0) if gpus else kind, "gpus": gpus}, f)
    os.replace(f"{args.file}.part", args.file)
    for name, value in facts.items():
        print(f"{name:<14} {value}")
    print(
        "\n"
        + nvidia_smi(
            "--query-gpu=index,name,uuid,driver_version,memory.total,memory.used,compute_mode,mig.mode.current",
            "--format=csv",
        )
    )
    if gpus:
        print("\n" + nvidia_smi("topo", "-m"))
        for i in range(gpus):
            print(torch.cuda.get_device_properties(i))
        print(f"SUMMARY: {gpus} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, cupy {facts['cupy']}")
    elif kind != "cuda":
        print(f"SUMMARY: tried with --device {kind}, torch {torch.__version__}")
    else:
        print("SUMMARY: no CUDA device")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
