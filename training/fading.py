"""Faded histories: true frames made as weak as a rollout's, so that the model goes on from them.

A rollout in rooms never seen shows the model blurred pictures of little contrast. Where those come
only from rollouts, whose rooms are other ones than the truth's, the model learns to go on from
nothing that looks like that: the third run's pictures stood still while the keys turned. A faded
true frame looks alike, but what follows is the truth, which moves as the keys say and is sharp.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

RAMP_CHUNKS = 4.0


def faded(
    history: torch.Tensor, share: float, per_chunk: int, first: int, generator: torch.Generator
) -> torch.Tensor:
    """Some clips of history [B, T, C, H, W] fade from a chunk of their own on, not before `first`.

    Over RAMP_CHUNKS chunks a frame becomes its mean over 5 x 5 latents, its contrast about its own
    mean goes down to 0.4 at the least, and its mean goes up to half of the way to the clip's: each
    clip draws how far it goes in each. share: of the clips that fade at all.
    """
    batch, frames = history.shape[:2]
    chunks, like = frames // per_chunk, {"generator": generator, "device": history.device}
    u = torch.rand(5, batch, **like)
    start = first + u[0] * max(chunks - first, 1)
    at = torch.arange(chunks, device=history.device) - start[:, None].floor()
    ramp = ((at + 1) / RAMP_CHUNKS).clamp(0, 1) * (u[1] < share)[:, None]
    ramp[:, :first] = 0
    ramp = ramp.repeat_interleave(per_chunk, dim=1)[:, :, None, None, None]
    blur, weak, common = (x[:, None, None, None, None] * ramp for x in (u[2], 0.6 * u[3], u[4] / 2))
    smooth = F.avg_pool2d(history.flatten(0, 1), 5, 1, 2, count_include_pad=False)
    smooth = smooth.view_as(history)
    own = history.mean(dim=(3, 4), keepdim=True)
    clip = own.mean(dim=1, keepdim=True)
    shape = (1 - weak) * (history + blur * (smooth - history) - own)
    return torch.where(ramp > 0, own + common * (clip - own) + shape, history)
