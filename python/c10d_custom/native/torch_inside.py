"""Who looks at a call: whether anyone watches torch's dispatcher in this thread, and whether tensors are what they
look like. The one place that decides which calls go straight to the core and which by way of torch's dispatcher.

`goes_direct(*arguments)`: whether nobody watches, and all tensors among the arguments, or in lists of them, are of the
CPU or a GPU, no stand-ins for something else (wrappers, fake, functional, zero, meta, batched ones), and such that
autograd need not be told of what becomes of them. `nobody_watches()`: its first half. A mode of torch's functions
(torch.overrides) does not count: no call of torch.distributed is seen by one.

In C where torch shows how (backend/python/torch_inside.h): a thread-local word of libc10 is what every dispatch mode,
transform of functorch and tracer sets, and a tensor's keys say what it is. Neither is to be had from Python at a small
call's price. Where the keys lie in a tensor is found by trying, and believed only if all of several tensors agree."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

TYPES = (torch.Tensor, torch.nn.Parameter)
# Inside, what is asked of a tensor no function mode or subclass (torch.overrides) sees: torch's own groups ask nothing
# that one does.
without_functions = torch._C.DisableTorchFunction
_LIBC10, _LIBTORCH = "libc10.so", "libtorch_cpu.so"
_WORD = b"_ZN3c104impl26raw_local_dispatch_key_setE"
_REQUIRES_GRAD = "_ZNK3c1010TensorImpl13requires_gradEv"
_GRAD_ENABLED = "_ZN3c108GradMode10is_enabledEv"
_BUMP_VERSION = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE"
_WORD_BYTES = 8
_IMPL_WORDS = 22  # of TensorImpl, whose last but one they are; it has at least so many


def _keys(*names: str) -> int:
    found = 0
    for name in names:
        found |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return found


_CPU = _keys("CPU")
_COUNTED = _keys("ADInplaceOrView")  # which tensors of inference mode have not
_HARMLESS = _COUNTED  # included in inference mode, less its default
_PLAIN = _keys("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU")
_DIRECT = _PLAIN | _keys(
    *("CUDA", "AutogradCUDA", "AutocastCUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA"),
    *("Conjugate", "Negative"),
)


def keys_of(t: torch.Tensor) -> int:
    """The dispatch keys of a tensor, as torch numbers them."""
    return torch._C._dispatch_keys(t).raw_repr()


def _in_graph(t: torch.Tensor) -> bool:
    return t.requires_grad and torch.is_grad_enabled()


def stands_for_another(t: torch.Tensor) -> bool:
    """Whether its values lie elsewhere than in memory of its own, or nowhere."""
    return not goes_direct(t) and bool(keys_of(t) & ~_DIRECT)  # the first asks in a tenth of the time


def count_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd that they have changed, as it does itself where they are written to. Its RuntimeError of tensors
    of inference mode, outside of it, and of leaves of a graph."""
    if any(t.is_leaf and _in_graph(t) for t in tensors):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    counted = [t for t in tensors if keys_of(t) & _COUNTED]
    if len(counted) < len(tensors) and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed. You can make a clone to get a "
            "normal tensor before doing inplace update."
        )
    torch._C._increment_version(counted)


def _nobody_watches() -> bool:
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _is_direct(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return all(map(_is_direct, argument))
    if type(argument) in TYPES:
        return not keys_of(argument) & ~_DIRECT and not _in_graph(argument)
    return not issubclass(type(argument), torch.Tensor)


def _goes_direct(*arguments: Any) -> bool:
    return _nobody_watches() and all(map(_is_direct, arguments))


def _place(of: Sequence[tuple[int, int]], words: range) -> int:
    """At how many bytes from each address that value lies. ValueError unless there is one such place."""
    found = [
        i * _WORD_BYTES
        for i in words
        if all(ctypes.c_uint64.from_address(address + i * _WORD_BYTES).value == value for address, value in of)
    ]
    if len(found) != 1:
        raise ValueError(f"torch's tensors have what is looked for at {found}")
    return found[0]


def _samples() -> list[torch.Tensor]:
    """Tensors that differ in their keys, and in all else that may lie beside them."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), _disable_current_modes():
        plain = torch.empty(3, 5, device="cpu")
        return [
            plain,
            plain.t(),
            torch.empty(2, requires_grad=True, device="cpu"),
            torch.nn.Parameter(torch.empty(1, device="cpu")),
            torch._neg_view(plain),
            torch._efficientzerotensor((4,), device="cpu"),
            torch.empty(2, device="meta"),
        ]


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    if not address:
        raise ValueError(f"no {name}")
    return address


def _in_c() -> tuple[Callable[..., bool], Callable[[], bool]]:
    from . import _fast  # see setup.py for when it is not there

    loaded = os.RTLD_NOLOAD | os.RTLD_LAZY
    libc10, libtorch = ctypes.CDLL(_LIBC10, loaded), ctypes.CDLL(_LIBTORCH, loaded)
    samples = _samples()
    objects = range(2, min(type(t).__basicsize__ for t in samples) // _WORD_BYTES)
    _fast.set_up_inside(
        _place([(id(t), t._cdata) for t in samples], objects),
        _place([(t._cdata, keys_of(t)) for t in samples], range(_IMPL_WORDS)),
        _CPU,
        _PLAIN,
        _DIRECT,
        _COUNTED,
        _HARMLESS,
        _COUNTED,
        _address(libc10, _REQUIRES_GRAD),
        _address(libc10, _GRAD_ENABLED),
        _address(libtorch, _BUMP_VERSION),
        _address(ctypes.CDLL(None), "dlsym"),
        libc10._handle,
        _WORD,
        torch.Tensor,
        TYPES,
    )
    return _fast.goes_direct, _fast.nobody_watches


in_c = False
goes_direct: Callable[..., bool] = _goes_direct
nobody_watches: Callable[[], bool] = _nobody_watches
try:
    goes_direct, nobody_watches = _in_c()
    in_c = True
except (ImportError, AttributeError, OSError, ValueError):  # not built, or a torch that hides it
    pass
