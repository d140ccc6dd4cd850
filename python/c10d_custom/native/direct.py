"""The direct way of calls of plain tensors, past torch's dispatcher, to the core, and who may go it: whether anyone
watches the dispatcher in this thread, and whether tensors are what they look like.

`goes_direct(*arguments)`: whether nobody watches, and all tensors among the arguments, or in lists of them, are of the
CPU or a GPU, no stand-ins for something else (wrappers, fake, functional, zero, meta, batched ones), and such that
autograd need not be told of what becomes of them. `nobody_watches()`: its first half. A mode of torch's functions
(torch.overrides) does not count: no call of torch.distributed is seen by one.

In C where torch shows how (backend/python/torch_inside.h): a thread-local word of libc10 is what every dispatch mode,
transform of functorch and tracer sets, and a tensor's keys say what it is. Neither is to be had from Python at a small
call's price. Where the keys lie in a tensor is found by trying, and believed only if all of several tensors agree.

Small calls of plain CPU tensors go from c10d's arguments to the core in C (backend/python): collectives in equal parts,
messages, and the tickets of both. What a Call and its checks cost is many times what the core takes for a few bytes,
and where ranks share a core it is paid by one after the other. A torch that hides what its tensors are has no such way:
there all calls go the slow path."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..call import SHAPES, Op
from ..dtypes import BY_DTYPE, PACKED, REDUCES
from . import address_of, extension, lib

if TYPE_CHECKING:
    from ._fast import CoreTicket, CoreWindow, FastCollective


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
# So many words of a TensorImpl are searched for its dispatch keys, which are its last word but one: it has at least as
# many, and one more where Python has no global lock.
_IMPL_WORDS = 22 + (not getattr(sys, "_is_gil_enabled", lambda: True)())

# By some of these numbers, which are part of torch's file formats, it is found where a tensor has its own.
_SCALAR_TYPES = {torch.uint8: 0, torch.int16: 2, torch.int64: 4, torch.float16: 5, torch.float64: 7, torch.bfloat16: 15}
_SLOW = "q", "bits", "float4"  # what the names of dtypes begin with that DLPack does not have, or not one by one


def _keys(*names: str) -> int:
    found = 0
    for name in names:
        found |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return found


_CPU = _keys("CPU")
_COUNTED = _keys("ADInplaceOrView")  # which tensors of inference mode have not
_HARMLESS = _COUNTED  # of a thread's included keys, less those by default: what inference mode leaves there
_PLAIN = _keys("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU")
_DIRECT = _PLAIN | _keys(
    *("CUDA", "AutogradCUDA", "AutocastCUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA"),
    *("Conjugate", "Negative"),
)

_OF_A_CLASS = _keys("Python", "PythonTLSSnapshot")


def keys_of(t: torch.Tensor) -> int:
    """The dispatch keys of a tensor, as torch numbers them."""
    return torch._C._dispatch_keys(t).raw_repr()


def _in_graph(t: torch.Tensor) -> bool:
    return t.requires_grad and torch.is_grad_enabled()


def stands_for_another(t: torch.Tensor) -> bool:
    """Whether its values lie elsewhere than in memory of its own, or nowhere. Of a class with a __torch_dispatch__ both
    may be: its storage says which."""
    if goes_direct(t) or not (keys := keys_of(t) & ~_DIRECT):  # the first asks in a tenth of the time
        return False
    return bool(keys & ~_OF_A_CLASS) or not _has_storage(t)


def _has_storage(t: torch.Tensor) -> bool:
    try:
        return bool(t.untyped_storage().data_ptr())
    except RuntimeError:  # one that says so itself, as a fake tensor's
        return False


def is_freed(t: torch.Tensor) -> bool:
    """Whether it has elements and no storage for them: that has been resized to 0."""
    return t.numel() > 0 and not _has_storage(t)


def count_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Tells autograd that they have changed, as it does itself where they are written to. Its RuntimeError of tensors
    of inference mode, outside of it, and of leaves of a graph."""
    if any(t.is_leaf and _in_graph(t) for t in tensors):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    counted = [t for t in tensors if keys_of(t) & _COUNTED]
    if len(counted) < len(tensors) and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed. "
            "You can make a clone to get a normal tensor before doing inplace update."
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


def _place(of: Sequence[tuple[int, int]], steps: range, kind: Any) -> int:
    """At how many bytes from each address that value, of that type of ctypes, lies. ValueError unless there is one such
    place."""
    found = [at for at in steps if all(kind.from_address(address + at).value == value for address, value in of)]
    if len(found) != 1:
        raise ValueError(f"torch's tensors have what is looked for at {found}")
    return found[0]


def _samples() -> list[torch.Tensor]:
    """Tensors that differ in their keys, and in all else that may lie beside them."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), _disable_current_modes():
        plain, longer = torch.empty(3, 5, device="cpu"), torch.empty(9999, dtype=torch.uint8, device="cpu")
        return [
            plain,
            longer[4567:4568],
            longer[8901:8902],
            plain.t(),
            torch.empty(2, requires_grad=True, device="cpu"),
            torch.nn.Parameter(torch.empty(1, device="cpu")),
            torch._neg_view(plain),
            torch._efficientzerotensor((4,), device="cpu"),
            torch.empty(2, device="meta"),
        ]


def _numbers() -> tuple[int, dict[int, int]]:
    """Where a TensorImpl has torch's number of its dtype (ScalarType), and our code by that number."""
    with torch.inference_mode(False), torch._C.DisableTorchFunction(), _disable_current_modes():
        any16 = torch.empty(16, dtype=torch.uint8, device="cpu")  # torch.empty of some dtypes warns
        made = {d.code: any16.view(t) for t, d in BY_DTYPE.items() if not d.name.startswith(_SLOW)}
    known = [(t._cdata, _SCALAR_TYPES[t.dtype]) for t in made.values() if t.dtype in _SCALAR_TYPES]
    at = _place(known, range(0, _IMPL_WORDS * _WORD_BYTES, 2), ctypes.c_uint16)
    return at, {ctypes.c_uint16.from_address(t._cdata + at).value: code for code, t in made.items()}


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    if not address:
        raise ValueError(f"no {name}")
    return address


def _in_c() -> tuple[Callable[..., bool], Callable[[], bool], dict[int, int]]:
    loaded = os.RTLD_NOLOAD | os.RTLD_LAZY
    libc10, libtorch = ctypes.CDLL(_LIBC10, loaded), ctypes.CDLL(_LIBTORCH, loaded)
    samples = _samples()
    objects = range(2 * _WORD_BYTES, min(type(t).__basicsize__ for t in samples) - _WORD_BYTES + 1, _WORD_BYTES)
    impls = range(0, _IMPL_WORDS * _WORD_BYTES, _WORD_BYTES)
    dtype_at, codes = _numbers()
    extension.set_up_inside(
        _place([(id(t), t._cdata) for t in samples], objects, ctypes.c_uint64),
        _place([(t._cdata, keys_of(t)) for t in samples], impls, ctypes.c_uint64),
        dtype_at,
        _place([(t._cdata, int(t.storage_offset())) for t in samples if t.storage_offset()], impls, ctypes.c_uint64),
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
    return extension.goes_direct, extension.nobody_watches, codes


in_c = False
goes_direct: Callable[..., bool] = _goes_direct
nobody_watches: Callable[[], bool] = _nobody_watches
_codes: dict[int, int] = {}
try:
    goes_direct, nobody_watches, _codes = _in_c()
    in_c = True
except (AttributeError, OSError, ValueError):  # a torch that hides it
    pass


# What a message's function returns: transport.FastMessage.
OVER, POSTED, NOT_BEGUN = range(3)


def _set_up() -> bool:
    """Tells the extension what it needs of torch and of the core. Whether tensors can go the fast way."""
    tickets = lib.c10d_test, lib.c10d_settle, lib.c10d_release
    windows = lib.c10d_window_put, lib.c10d_window_signal, lib.c10d_window_wait, lib.c10d_window_free
    extension.set_up_core(*map(address_of, (*tickets, *windows)))
    if not in_c:
        return False
    try:
        extension.set_up(torch.Tensor.__dlpack_c_exchange_api__, bytes(n for each in _codes.items() for n in each))
    except (AttributeError, ValueError):  # this torch does not show C its tensors, or in another way
        return False
    of_code = {code: (PACKED[code] >> 16, REDUCES[code]) for code in PACKED}
    shapes = [SHAPES[Op(number)] for number in range(len(SHAPES))]
    packed = [
        s.reads | s.writes << 2 | s.from_each << 4 | s.to_each << 5 | s.reduces << 6 | s.counted << 7 for s in shapes
    ]
    kinds = bytes(n for code in range(max(of_code) + 1) for n in of_code.get(code, (0, 0)))
    extension.set_up_kinds(kinds, bytes(packed))
    return True


_tensors_go = _set_up()
if not TYPE_CHECKING:
    CoreTicket, CoreWindow = extension.CoreTicket, extension.CoreWindow


def collective(function: Any, handle: int, rank: int, size: int, submit: Any = None) -> FastCollective | None:
    """``function``: c10d_fast_collective, or another of native.lib that takes and returns the same; ``handle``: its
    first argument; ``submit``: c10d_fast_submit, or None."""
    if not _tensors_go:
        return None
    made: FastCollective = extension.FastCollective(address_of(function), handle, rank, size, address_of(submit))
    return made


def message(handle: Any, ranks: int) -> Callable[..., int] | None:
    """A function that posts a message of the only one of its tensors and waits a while for its end, as
    transport.FastMessage. OVER; or POSTED, and the ticket's address is in the list ``posted``, unless the group is
    closed; or NOT_BEGUN, as it is no plain CPU tensor with elements, or no such peer, or somebody watches torch's
    dispatcher."""
    if not _tensors_go:
        return None
    return partial(extension.message, address_of(lib.c10d_message), handle, ranks)
