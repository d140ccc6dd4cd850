"""Switches a feature of a group off where this torch lacks a private name that it rests on (such names move): a warning
says so once, and all else goes on."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

_told: set[str] = set()


@contextlib.contextmanager
def optional(feature: str) -> Iterator[None]:
    """Inside, any Exception turns ``feature`` (a few words, for the warning) off for what is being made."""
    try:
        yield
    except Exception as error:
        if feature not in _told:
            _told.add(feature)
            import torch

            warnings.warn(
                f"c10d-custom: {feature} is off, because torch {torch.__version__} does not have what it rests on "
                f"({type(error).__name__}: {error})",
                RuntimeWarning,
                stacklevel=3,
            )
