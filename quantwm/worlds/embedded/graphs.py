"""CUDA graphs of all that does not depend on the history's length: one launch for 40 to 90 ops.

Between two attentions everything has one shape, whatever the lane and however long its history:
output projection, gates, norms, feed-forward, the next block's projections and RoPE. One H200
behind a slow host spent 268 ms on a chunk in three lanes and was busy for 27 ms of it: 9,061
launches. A pass is layers + 1 graphs here, and the attention between them goes to the lane's
cache. The static tensors belong to one world and are shared by its lanes, which take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quantwm.cache.capture import Capture, Captured
from quantwm.worlds.embedded.autoencoder import Autoencoder, to_bytes
from quantwm.worlds.embedded.pose import FEATURES
from quantwm.worlds.embedded.transformer import Attend, Transformer


class GraphedTransformer:
    """`Transformer.forward` for chunks of one shape, with the attention outside of the graphs."""

    def __init__(
        self,
        model: Transformer,
        tables: Sequence[torch.Tensor],
        capture: Capture,
        batch: Sequence[int] = (),
    ) -> None:
        """tables: the RoPE tables cos and sin, whose memory holds the chunk's at every call.
        batch: leading dimensions of everything, for several sessions in one pass."""
        config, weight = model.config, model.patch_in.weight
        shape, width = (*batch, config.frames_per_chunk), config.width
        like = {"device": weight.device, "dtype": torch.float32}
        self._latents = torch.zeros(*shape, *config.latent_shape, **like)
        self._shared = torch.zeros(*shape, 6, width, **like)
        self._head = torch.zeros(*shape, 1, width, **like)
        self._pose = torch.zeros(*shape, config.grid[1], FEATURES, **like) if config.pose else None
        self._attended = torch.zeros(
            *batch, config.heads, config.tokens_per_chunk, config.head_dim,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        self._model, self._tables = model, tuple(tables)
        self._parts: list[Captured] = []
        with torch.no_grad():
            for layer in range(config.layers + 1):
                self._parts.append(capture(lambda layer=layer: self._segment(layer)))

    def __call__(
        self,
        latents: torch.Tensor,
        shared: torch.Tensor,
        head: torch.Tensor,
        attend_at: Callable[[int], Attend],
        pose: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Transformer.forward`; q, k and v are valid until the next call, so attend copies."""
        self._latents.copy_(latents)
        self._shared.copy_(shared)
        self._head.copy_(head)
        if self._pose is not None and pose is not None:
            self._pose.copy_(pose)
        for layer, ((_, *qkv), replay) in enumerate(self._parts[:-1]):
            replay()
            self._attended.copy_(attend_at(layer)(*qkv))
        (prediction,), replay = self._parts[-1]
        replay()
        return prediction.clone()

    def _segment(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Block layer - 1 after its attention, then block `layer` before its own: x, q, k, v."""
        model, blocks = self._model, self._model.blocks
        if layer == 0:
            x = model.enter(self._latents, pose=self._pose)
        else:
            x = self._parts[layer - 1][0][0]
            x = blocks[layer - 1].after(x, self._attended, self._modulation(layer - 1))
        if layer == len(blocks):
            return (model.leave(x, self._head),)
        return x, *blocks[layer].before(x, self._modulation(layer), *self._tables)

    def _modulation(self, layer: int) -> torch.Tensor:
        return self._shared + self._model.blocks[layer].table.float()


class GraphedDecoder:
    """Latents of one chunk to pictures in bytes, in one graph."""

    def __init__(self, model: Autoencoder, shape: Sequence[int], capture: Capture) -> None:
        """shape: [frames, C, h, w] of a chunk."""
        self.shape = tuple(shape)
        self._latents = torch.zeros(self.shape, device=model.latent_mean.device)
        with torch.no_grad():
            (self._bytes,), self._replay = capture(lambda: (to_bytes(model.decode(self._latents)),))

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        """uint8 [frames, H, W, 3], valid until the next call."""
        self._latents.copy_(latents)
        self._replay()
        return self._bytes
