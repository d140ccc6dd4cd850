"""The second way into a call: through torch's dispatcher, as calls of torch's own groups go, to the Backend that is
registered in the group (backend.py). Calls go so that somebody watches (a dispatch mode, a transform of functorch, a
tracer, a profiler), or whose tensors are more than memory (native/torch_inside.py says which). All others go straight
from the group's methods to the core, in a tenth of the time.

Where torch has no Backend for Python (before 2.14), such a call is carried out on what is behind the tensors, where
that is the same; else refused, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..errors import UsageError
from ..native import torch_inside
from ..threads import threading
from .operations import Operations
from .profiling import profiler_enabled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .issuing import Issuing

_UNANNOUNCED = "send", "recv", "recv_anysource", "monitored_barrier"  # no other rank waits for such a call's number
_FIRST_TO_SEE = "2.14"  # for errors; backend.REGISTERED decides

_function_modes = torch._C._len_torch_function_stack


class _Reached(threading.local):
    """Whether this thread's call has come out of the dispatcher, in the group's Backend, and the Works made there."""

    yes = False

    def __init__(self) -> None:
        self.works: list[Any] = []


reached = _Reached()


def below(group: Issuing) -> Operations:
    """The operations of a group, without its way through the dispatcher: with the same state."""
    operations = object.__new__(Operations)
    operations.__dict__ = group.__dict__
    return operations


class Dispatching(Operations):
    """What a whole group adds to its operations: the way through the dispatcher."""

    _registered = False  # whether torch's C++ knows the group's Backend
    # Calls under way through the dispatcher, and one more where all go there. While there are any, the group's methods
    # are torch's: torch's C++ would else come back to ours.
    _passing = 0
    _entering = threading.RLock()

    def _by_torch(self, *tensors: Any) -> bool:
        return profiler_enabled() or self._unlike_memory(*tensors)

    def _unlike_memory(self, *tensors: Any) -> bool:
        return bool(_function_modes()) or not torch_inside.goes_direct(*tensors)

    def _dispatched(self, name: str, *arguments: Any) -> Any:
        """The operation of that name of torch's group. ``arguments``: as the method was given them."""
        if not self._registered:
            return self._unseen(name, arguments)
        if not profiler_enabled() and torch_inside.goes_direct(*arguments):
            with torch_inside.without_functions():
                return getattr(Operations, name)(below(self), *arguments)
        # torch's methods have one form without each.
        given = [_with_values(a) if isinstance(a, (list, tuple)) else a for a in arguments if a is not None]
        outer, reached.yes, reached.works = (reached.yes, reached.works), False, []
        try:
            with self._as_torch():
                result = vars(ProcessGroup)[name](self, *given)
            # What C++ has made of a Work of ours says neither whether it is over nor where a message came from.
            return reached.works[0] if len(reached.works) == 1 and isinstance(result, dist.Work) else result
        except Exception:
            # Under a mode nobody knows what becomes of the others' calls.
            if not reached.yes and name not in _UNANNOUNCED and torch_inside.nobody_watches():
                self._tell_refused()
            raise
        finally:
            reached.yes, reached.works = outer

    @contextmanager
    def _as_torch(self) -> Iterator[None]:
        """Inside, the group's methods are torch's own, for other threads, too: their calls are carried out as well."""
        self._enter()
        try:
            yield
        finally:
            with self._entering:
                self._passing -= 1
                if not self._passing:
                    self.__class__ = self._ours

    def _enter(self) -> None:
        with self._entering:
            self._passing += 1
            self.__class__ = self._torchs

    def dispatch(self) -> None:
        """From now on, all calls of this group go through torch's dispatcher, where hooks are called before and after
        them, and which takes some 20 to 50 us longer."""
        self._enter()

    _ours: type[Any]
    _torchs: type[Any]

    def _unseen(self, name: str, arguments: Sequence[Any]) -> Any:
        if traced := _traced():
            raise UsageError(
                f"{name} inside {traced}: torch {torch.__version__} does not show it calls of this backend, and it "
                f"would be left out of what is recorded. It takes torch {_FIRST_TO_SEE} or newer."
            )
        with torch_inside.without_functions():
            given = self._lowered(lambda: [_memory_of(name, a) for a in arguments])
            return getattr(Operations, name)(below(self), *given)


def _traced() -> str:
    """What makes a record of calls, or another thing than the call, in this thread; "" where nothing does."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    kinds = torch._C._TorchDispatchModeKey
    for kind in ("PROXY", "FAKE", "FUNCTIONAL"):
        mode = torch._C._get_dispatch_mode(getattr(kinds, kind))
        if mode is not None:
            return type(mode).__name__
    return ""


def _with_values(tensors: Any) -> Any:
    """A list as torch's dispatcher should get it: it looks for what stands for another tensor in lists, and not in
    lists of lists. There we do it, for what has its values in one other tensor."""
    return [[_behind(t) for t in part] if isinstance(part, (list, tuple)) else part for part in tensors]


def _behind(t: Any) -> Any:
    if type(t).__name__ == "AsyncCollectiveTensor":
        return t.trigger_wait()
    functorch = torch._C._functorch
    while isinstance(t, torch.Tensor) and functorch.is_gradtrackingtensor(t):
        t = functorch.get_unwrapped(t)
    return t


def _memory_of(name: str, argument: Any) -> Any:
    """The argument, or the plain tensor that it stands for. UsageError where there is none."""
    if isinstance(argument, (list, tuple)):
        return [_memory_of(name, a) for a in argument]
    if not isinstance(argument, torch.Tensor) or argument.is_meta or not torch_inside.stands_for_another(argument):
        return argument
    if (behind := _behind(argument)) is not argument:
        return _memory_of(name, behind)
    raise UsageError(
        f"{name}: a {type(argument).__name__} with the keys {torch._C._dispatch_keys(argument)} is no memory that can "
        f"be communicated; with torch {_FIRST_TO_SEE} or newer it is up to its class"
    )
