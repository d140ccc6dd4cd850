"""Keeps torch.compile out of the group's methods, all alike."""

from __future__ import annotations

from typing import TypeVar

from .optional import optional

_T = TypeVar("_T")


def opaque_to_dynamo(cls: type[_T]) -> type[_T]:
    """Keeps Dynamo out of a class's methods: when it traces a caller (the attribute is what
    torch.compiler.disable sets; importing that costs a second) and when C++, DDP's reducer say, calls
    one while compiled code runs."""
    with optional("torch.compile around calls of this backend"):
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for member in vars(cls).values():
            if callable(member) and hasattr(member, "__code__"):
                member._torchdynamo_disable = True
                set_code_exec_strategy(member.__code__, skip)
    return cls
