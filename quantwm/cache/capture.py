"""CUDA graphs of pieces of work on static tensors, which cost one launch each."""

from __future__ import annotations

from collections.abc import Callable

import torch

Segment = Callable[[], tuple[torch.Tensor, ...]]
"""Reads static tensors, returns new ones; must not wait for the device."""
Captured = tuple[tuple[torch.Tensor, ...], Callable[[], None]]
"""A segment's static outputs, and what fills them anew from its static inputs."""
Capture = Callable[[Segment], Captured]

WARM_UPS = 2


class CudaCapture:
    """Captures segments into CUDA graphs that share one memory pool.

    They may share it because they are replayed in the order of their capture, one at a time, and
    every tensor that a later segment reads is held by whoever captured it.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """stream: to capture on; one of its own without. cuBLAS keeps memory for each, 32 MiB on
        Hopper, and what was captured works in it wherever it is replayed."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device) if stream is None else stream

    @property
    def nbytes(self) -> int:
        """Of the pool: what segments return and what they work in. It walks the allocator."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if s["segment_pool_id"] == self._pool)

    def __call__(self, segment: Segment) -> Captured:
        # Libraries make their handles and workspaces at first use, which a capture cannot hold.
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                segment()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what another thread does meanwhile (the page reads memory) is no fault.
        # Outside it the stream of before: a capture that cannot be ended leaves its own behind.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            outputs = segment()
        return outputs, graph.replay
