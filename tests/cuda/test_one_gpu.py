"""What tests/gpu/one_gpu.py does on one GPU, with threads of the host as ranks, streams and device threads."""

import pytest

from c10d_custom.transport.cuda import algorithm
from gpu import one_gpu


@pytest.mark.parametrize("part", one_gpu.PARTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_fused_kernels_of_one_gpu(library, monkeypatch, size, part, full):
    for name in ("FLAGGED_BYTES", "one_shot_bytes"):  # which Ranks sets
        monkeypatch.setattr(algorithm, name, getattr(algorithm, name))
    ranks = one_gpu.Ranks(one_gpu.Host(size, library), size)
    assert one_gpu.PARTS[part](ranks, few=not full) > 0 or size == 1
