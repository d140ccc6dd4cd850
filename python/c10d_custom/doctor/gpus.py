"""GPUs, and what CUDA tensors need beside them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ..extras import how_to_install
from .finding import Finding, State, there

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")  # the same module under names of its own for each CUDA


def gpus() -> Finding:
    """Names, and the way that groups would choose for CUDA tensors, as far as one process can know."""
    import torch

    cupy, bindings = there("cupy", *_CUPY), there("cuda.bindings", "cuda-bindings")
    facts: dict[str, Any] = {"cupy": cupy, "cuda_bindings": bindings, "torch_cuda": torch.version.cuda, "gpus": []}
    if not torch.cuda.is_available():
        seen = Path("/dev/nvidiactl").exists()
        if not seen:
            return Finding("GPUs", "none: CPU tensors only", facts=facts)
        why = "is a build without CUDA" if torch.version.cuda is None else "cannot use it: driver too old, or hidden?"
        return Finding("GPUs", f"there is one, but this torch {why}", State.REMARK, facts)
    try:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        reach = all(torch.cuda.can_device_access_peer(0, i) for i in range(1, len(names)))
    except Exception as error:
        return Finding("GPUs", f"CUDA does not start: {error}", State.REMARK, facts)
    facts["gpus"] = names
    facts["mode"] = mode = "shared" if len(names) < 2 else "p2p" if reach else "staged"
    text = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in Counter(names).items())
    missing = [name for name, found in (("cupy", cupy), ("cuda-bindings", bindings)) if found is None]
    if missing:
        need, toolkit = " and ".join(missing), (torch.version.cuda or "13").split(".")[0]
        text = f"{text}; CUDA tensors need {need}: {how_to_install(f'cuda{toolkit}')}"
        return Finding("GPUs", text, State.REMARK, facts)
    ways = {
        "shared": "ranks share it: mode shared",
        "p2p": "mode p2p where each rank has its own and a trial passes, else shared or staged",
        "staged": "the first cannot read the others' memory: mode staged, or shared where ranks share GPUs",
    }
    return Finding("GPUs", f"{text}; {ways[mode]}; cupy {cupy}, cuda-bindings {bindings}", facts=facts)
