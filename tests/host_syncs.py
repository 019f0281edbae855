"""Counting what would make the host wait for a device, on tensors of a CPU."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
"""Operations whose result or shape the host must read: .item(), .tolist() of one element, a mask
as an index and their like."""


class HostSyncs(TorchDispatchMode):
    """Counts reads of tensors by the thread that enters it; `names` lists them.

    `.tolist()` reaches no operation, so it is counted by a patched method, and a copy to the CPU
    is one where the source says that it is on CUDA.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masked = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        if masked or name in READS or name.startswith("_linalg"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> HostSyncs:
        self._lists, names, own = torch.Tensor.tolist, self.names, threading.get_ident()

        def tolist(tensor: torch.Tensor) -> Any:
            if threading.get_ident() == own:
                names.append("tolist")
            return self._lists(tensor)

        torch.Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        torch.Tensor.tolist = self._lists
        super().__exit__(*failure)
