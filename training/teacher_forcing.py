"""Teacher forcing on two streams: a clean copy of the clip, then a noisy one, in one sequence.

Clean chunk c sees clean chunks up to itself: what the clean pass writes to a cache. Noisy chunk c
sees clean chunks before it and itself: what a denoising pass sees. One forward trains every chunk
of the clip, and equals a rollout through a cache (tests/test_training_equality.py). Chunks that
`training/gaps.py` hides are seen by themselves only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from quantwm.worlds.embedded.config import TransformerConfig
from quantwm.worlds.embedded.rope import rope_tables
from quantwm.worlds.embedded.transformer import Attend, Transformer
from training.gaps import HiddenChunks


def sees(
    q: torch.Tensor, k: torch.Tensor, tokens: int, chunk_tokens: int, window: torch.Tensor,
    hidden: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Whether token q may see token k; the one definition of the mask, for both attentions.

    tokens: of one stream; window: how many chunks before its own a chunk sees, 0-dim tensor;
    hidden: whether chunk k of both streams is. Whatever does not depend on both q and k is a
    vector in the compiled kernel, so that each pair costs three comparisons.
    """
    chunks = tokens // chunk_tokens
    q_at, k_at = q // chunk_tokens, k // chunk_tokens  # in both streams: noisy chunks come last
    chunk = q_at % chunks
    first, last = chunk - window, chunk - q_at // chunks  # a noisy chunk's own truth is not seen
    k_seen = k_at if hidden is None else torch.where(hidden(k_at), -tokens, k_at)
    return ((k_seen >= first) & (k_seen <= last)) | (k_at == q_at)


def dense_mask(
    frames: int, config: TransformerConfig, window: int, device: torch.device | str
) -> torch.Tensor:
    """Bool [2N, 2N] for SDPA, N = frames * tokens_per_frame; True where q (row) sees k."""
    tokens = frames * config.tokens_per_frame
    index = torch.arange(2 * tokens, device=device)
    limit = torch.tensor(window, device=device)
    return sees(index[:, None], index[None, :], tokens, config.tokens_per_chunk, limit)


def block_mask(
    frames: int, config: TransformerConfig, window: int, device: torch.device | str,
    hidden: HiddenChunks | None = None,
) -> BlockMask:  # fmt: skip
    """The same mask for FlexAttention; with `hidden` less what is hidden when it is used.

    Tiles are chosen once, as if nothing were hidden. What may be hidden has to be asked in every
    one of them, so then none is declared to be seen whole.
    """
    tokens, chunk = frames * config.tokens_per_frame, config.tokens_per_chunk
    limit = torch.tensor(window, device=device)

    def mask_mod(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return sees(q, k, tokens, chunk, limit)

    mask = create_block_mask(mask_mod, None, None, 2 * tokens, 2 * tokens, device=str(device))
    if hidden is None:
        return mask
    buffer = hidden.buffer

    def mask_with_gaps(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return sees(q, k, tokens, chunk, limit, lambda at: buffer[b, at])

    tiles = mask.to_dense().to(torch.int32)
    order = tiles.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        tiles.sum(dim=-1, dtype=torch.int32), order, BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask_with_gaps, seq_lengths=(2 * tokens, 2 * tokens),
    )  # fmt: skip


def flex_attend(mask: BlockMask) -> Attend:
    """Attention that skips what the mask hides. Compile the caller, or it runs slow and large."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=mask)

    return attend


def sdpa_attend(mask: torch.Tensor, hidden: HiddenChunks | None = None) -> Attend:
    """Plain masked attention, for a CPU and as the way out when FlexAttention does not compile."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = mask
        if hidden is not None:
            chunks = hidden.buffer.shape[1]
            chunk = torch.arange(len(mask), device=mask.device) // (len(mask) // chunks)
            away = hidden.buffer[:, chunk][:, None, None] & (chunk[:, None] != chunk)
            seen = mask & ~away
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    return attend


def two_stream_tables(
    frames: int, config: TransformerConfig, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE tables of the clean stream, then the same again for the noisy one."""
    cos, sin = rope_tables(0, frames, config.grid, config.head_dim, config.rope_theta, device)
    return torch.cat((cos, cos)), torch.cat((sin, sin))


def predict_clip(
    model: Transformer,
    clean: torch.Tensor,
    noisy: torch.Tensor,
    sigma: torch.Tensor,
    keys: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    attend: Attend,
    residual_dtype: torch.dtype = torch.float32,
    pose: torch.Tensor | None = None,
) -> torch.Tensor:
    """Clean prediction for the noisy stream, float32 [B, T, C, H, W].

    clean, noisy: [B, T, C, H, W]; sigma: [B, T], the noise level of each noisy frame; keys:
    [B, T, 6]; pose: of `pose_features` [B, T, columns, FEATURES]. The clean stream is always told
    noise level 0.
    """
    frames = clean.shape[1]
    levels = torch.cat((torch.zeros_like(sigma), sigma), dim=1)
    shared, head = model.condition(levels, torch.cat((keys, keys), dim=1))
    both = torch.cat((clean, noisy), dim=1)
    told = None if pose is None else torch.cat((pose, pose), dim=1)
    out = model(both, shared, head, *tables, lambda layer: attend, residual_dtype, told)
    return out[:, frames:]
