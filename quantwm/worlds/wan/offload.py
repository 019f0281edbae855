"""Weights that wait on the CPU and visit the device for the time of their work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Visits:
    """`with visits(module):` its weights are on the device; afterwards they are on the CPU again.

    The CPU's copy is never written: leaving costs nothing but the device's copy. It is pinned
    where there is a GPU, which doubles the speed of the way in.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._homes: dict[nn.Module, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        self.count = 0

    @contextmanager
    def __call__(self, module: nn.Module) -> Iterator[nn.Module]:
        homes = self._homes.get(module)
        if homes is None:
            homes = self._homes[module] = [(p, self._home(p)) for p in module.parameters()]
        self.count += 1
        try:
            for parameter, home in homes:
                parameter.data = home.to(self.device, non_blocking=True, copy=True)
            yield module
        finally:
            for parameter, home in homes:
                parameter.data = home

    def _home(self, parameter: nn.Parameter) -> torch.Tensor:
        home = parameter.data.cpu()
        if self.device.type == "cuda":
            home = home.pin_memory()
        parameter.data = home
        return home


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
