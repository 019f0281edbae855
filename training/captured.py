"""One training step as one CUDA graph, so that a slow or busy host no longer holds the GPU up.

The first full run left the GPU idle for 64% of the autoencoder's time: 14 renderers shared 16
slow cores with the loop that launched 900 kernels a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UPS = 4  # the optimiser makes its state, and the compiler its kernels


class CapturedStep:
    """Runs `step`, which takes no argument and returns static tensors, op by op a few times, then
    replays it. What it reads must lie in tensors that stay where they are; gradients too."""

    def __init__(self, step: Callable[[], tuple[torch.Tensor, ...]], device: torch.device) -> None:
        self._step = step
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._calls = 0

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if self._graph is not None:
            self._graph.replay()
            return self._outputs
        self._calls += 1
        current = torch.cuda.current_stream(self._stream.device)
        if self._calls <= WARM_UPS:
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                outputs = self._step()
            current.wait_stream(self._stream)
            return outputs
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that copies new frames to the device is no part of the step
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._outputs = self._step()
        self._graph = graph
        graph.replay()
        return self._outputs
