"""Muon: momentum whose step is the nearest orthogonal matrix, for the blocks' matrices.

Newton-Schulz iteration with the quintic coefficients published with Muon (Jordan et al., 2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns] -> matrices with singular values near 1; BF16 inside on a GPU."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are stepped together: ten layers cost three small batched products."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon steps matrices only; give the rest to AdamW")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                self._step_shape(group, shape, params)

    def _step_shape(
        self, group: dict[str, float], shape: torch.Size, params: list[torch.nn.Parameter]
    ) -> None:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum"] for p in params]
        gradients = [p.grad for p in params]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        # Nesterov: the gradient looks one momentum step ahead
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
        updates = orthogonalise(torch.stack(ahead))
        # keeps the size of an output's change the same for tall and wide matrices
        size = max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(updates.unbind()), alpha=-group["lr"] * size)
