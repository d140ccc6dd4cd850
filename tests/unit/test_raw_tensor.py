"""What the core is told of a tensor: in C, the same as in Python."""

import pytest
import torch

from c10d_custom import dtypes
from c10d_custom.native._fast import raw_tensor
from unit import fast_reference


class Subclass(torch.Tensor):
    pass


def tensors():
    for dtype in dtypes.BY_DTYPE:
        try:
            t = torch.empty(24, dtype=dtype)
        except (RuntimeError, NotImplementedError):
            continue  # a dtype whose tensors are made in other ways
        yield f"{dtype}", t
    t = torch.arange(24.0)
    z = torch.arange(24.0).to(torch.complex64)
    yield from {
        "view": t[3:7],
        "no dimension": t[5],
        "empty": t[:0],
        "empty, of two dimensions": torch.empty(4, 0),
        "two": t.view(4, 6),
        "transposed": t.view(4, 6).t(),
        "every other": t[::2],
        "columns": t.view(4, 6)[:, :3],
        "expanded": t[:1].expand(4),
        "one row": t.view(4, 6)[:1].t()[:, :1],
        "odd strides of one": t.as_strided((1, 4), (17, 1)),
        "reshaped": t.as_strided((4, 1, 6), (6, 3, 1)),
        "channels last": torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "negated": torch._neg_view(t),
        "conjugated": z.conj(),
        "imaginary part": z.imag,
        "of a conjugate": z.conj().imag,
        "real": torch.view_as_real(z),
        "of a gradient": t.clone().requires_grad_(),
        "a result": t.clone().requires_grad_() * 2,
        "a parameter": torch.nn.Parameter(t.clone()),
        "of a subclass": t.as_subclass(Subclass),
        "sparse": t.to_sparse(),
        "in rows": t.view(4, 6).to_sparse_csr(),
        "nowhere": torch.empty(3, device="meta"),
        "quantized": torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        "mkldnn": t.to_mkldnn() if torch.backends.mkldnn.is_available() else t,
        "a lazy copy": torch._lazy_clone(t),
        "inference": torch.inference_mode()(lambda: t + 1)(),
        "shared": t.clone().share_memory_(),
    }.items()


EVERY = list(tensors())
FOUND = {"view", "no dimension", "empty", "two", "a lazy copy", "shared", "odd strides of one", "reshaped"}


@pytest.mark.parametrize("name, t", EVERY, ids=[n for n, _ in EVERY])
def test_c_finds_what_python_finds(name, t):
    found = raw_tensor(t)
    if t.dtype not in (torch.qint8, torch.quint8, torch.qint32) and not str(t.dtype).startswith(
        ("torch.bits", "torch.quint", "torch.float4", "torch.bcomplex32")
    ):
        assert found == fast_reference.raw_tensor(t)
    if found:
        assert found == (t.data_ptr(), t.numel(), dtypes.BY_DTYPE[t.dtype].code)
        assert t.is_contiguous() and t.is_cpu
    if name in FOUND:
        assert found
    if name in (
        "transposed",
        "every other",
        "expanded",
        "negated",
        "conjugated",
        "of a conjugate",
        "sparse",
        "nowhere",
        "of a subclass",
        "quantized",
    ):
        assert found is None


@pytest.mark.parametrize("name", ["of a gradient", "a parameter"])
def test_what_autograd_follows_is_found_where_it_does_not(name):
    t = dict(EVERY)[name]
    assert raw_tensor(t) is None
    with torch.no_grad():
        assert raw_tensor(t)[:2] == (t.data_ptr(), t.numel())


def test_what_is_no_tensor():
    for other in (None, 1, [torch.ones(2)], "x"):
        assert raw_tensor(other) is None


def test_of_dtypes_that_are_reduced_all_are_found():
    for dtype, ours in dtypes.BY_DTYPE.items():
        if ours.reduces and ours.name != "bcomplex32":  # which DLPack does not have
            t = torch.zeros(3, dtype=dtype)
            assert raw_tensor(t) == (t.data_ptr(), 3, ours.code)


@pytest.mark.parametrize("name", [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)])
def test_of_dtypes_of_less_than_a_byte_none_is_found(name):
    """Though DLPack shows them as those of a byte."""
    if (dtype := getattr(torch, name, None)) is not None:
        assert raw_tensor(torch.zeros(3, dtype=torch.uint8).view(dtype)) is None


def test_nothing_under_vmap_and_grad():
    def look(x):
        assert raw_tensor(x) is None
        return x.sum()

    torch.vmap(look)(torch.ones(3, 4))
    torch.func.grad(look)(torch.ones(3))


def test_references_are_given_back():
    import sys

    t = torch.ones(5)
    before = [sys.getrefcount(o) for o in (t, None, True, False)]
    for _ in range(1000):
        raw_tensor(t)
        raw_tensor(t[::2])
        raw_tensor(7)
    after = [sys.getrefcount(o) for o in (t, None, True, False)]
    assert all(abs(a - b) < 100 for a, b in zip(after, before)), (before, after)
