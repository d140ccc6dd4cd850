"""Models whose DDP steps the benchmark times: layers of one width, and two in small that are as common ones are, with a
few large gradients among many small ones. None of them learns anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

_WORDS, _LENGTH = 4096, 16  # of the transformer: its vocabulary, a row's tokens


@dataclass(frozen=True)
class Model:
    """``inputs(rows, generator)``: a batch."""

    module: nn.Module
    inputs: Callable[[int, torch.Generator], torch.Tensor]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())


class _Residual(nn.Module):
    """Two convolutions, and what they are added to."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.outer = (
            nn.Identity()
            if before == after
            else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + self.outer(x))


def _resnet() -> Model:
    widths = (32, 64, 128, 256)
    parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    before = widths[0]
    for width in widths:
        parts += [_Residual(before, width, 1 if before == width else 2), _Residual(width, width, 1)]
        before = width
    parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return Model(nn.Sequential(*parts), lambda rows, g: torch.randn(rows, 3, 16, 16, generator=g))


def _transformer() -> Model:
    width = 256
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(4)]
    module = nn.Sequential(nn.Embedding(_WORDS, width), *layers, nn.Linear(width, _WORDS))
    return Model(module, lambda rows, g: torch.randint(_WORDS, (rows, _LENGTH), generator=g))


def _linear(width: int, layers: int) -> Model:
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())][:-1]
    return Model(nn.Sequential(*parts), lambda rows, g: torch.randn(rows, width, generator=g))


NAMED = {"resnet": _resnet, "transformer": _transformer}


def _width_and_layers(name: str) -> tuple[int, int] | None:
    width, _, layers = name.partition("x")
    if not (width.isdecimal() and layers.isdecimal()) or not int(width) * int(layers):
        return None
    return int(width), int(layers)


def known(name: str) -> bool:
    return name in NAMED or _width_and_layers(name) is not None


def make(name: str) -> Model:
    """A new one, the same on every rank; of a name that is ``known``."""
    torch.manual_seed(0)
    if (wanted := _width_and_layers(name)) is not None:
        return _linear(*wanted)
    return NAMED[name]()
