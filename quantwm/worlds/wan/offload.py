"""Weights that wait on the CPU and visit the device for the time of their work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

ALIGNED = 256
"""A parameter's place in its module's storage is a multiple of so many bytes."""


class _Home:
    """A module's weights in one storage on the CPU.

    One, because pinned memory is given out in powers of two: a block of LingBot 14B takes 1 GiB,
    and 1.25 where each of its 35 tensors is pinned by itself. And it is one copy instead of 35.
    """

    def __init__(self, module: nn.Module, pinned: bool) -> None:
        self._parameters = list(module.parameters())
        self._places = [0]
        for parameter in self._parameters:
            self._places.append(self._places[-1] + -(-parameter.nbytes // ALIGNED) * ALIGNED)
        self.storage = torch.empty(self._places[-1], dtype=torch.uint8, pin_memory=pinned)
        self.views = self._views(self.storage)
        for parameter, home in zip(self._parameters, self.views, strict=True):
            parameter.data = home.copy_(parameter.data)

    def move_out(self, device: torch.device) -> None:
        """Its weights to the device."""
        self._take(self._views(self.storage.to(device, non_blocking=True, copy=True)))

    def move_in(self) -> None:
        """Its weights are those at home again."""
        self._take(self.views)

    def _take(self, views: list[torch.Tensor]) -> None:
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view

    def _views(self, storage: torch.Tensor) -> list[torch.Tensor]:
        return [
            storage[place : place + p.nbytes].view(p.dtype).view(p.shape)
            for place, p in zip(self._places, self._parameters, strict=False)
        ]


class Visits:
    """`with visits(module):` its weights are on the device; afterwards they are on the CPU again.

    The CPU's copy is never written: leaving costs nothing but the device's copy. It is pinned
    where there is a GPU, which doubles the speed of the way in.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._homes: dict[nn.Module, _Home] = {}
        self.count = 0

    @contextmanager
    def __call__(self, module: nn.Module) -> Iterator[nn.Module]:
        home = self._homes.get(module)
        if home is None:
            home = self._homes[module] = _Home(module, pinned=self.device.type == "cuda")
        self.count += 1
        try:
            home.move_out(self.device)
            yield module
        finally:
            home.move_in()


def offload_blocks(model: nn.Module, device: torch.device) -> Visits:
    """Keep a CausalWan's blocks on the CPU; all else moves to the device."""
    blocks = model.blocks
    for name, child in model.named_children():
        if name != "blocks":
            child.to(device)
    for parameter in model.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    visits = Visits(device)
    blocks.to("cpu")
    model.visit = visits
    return visits
