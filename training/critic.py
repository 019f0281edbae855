"""A small critic of latents, which keeps edges in what few denoising steps draw.

A mean-squared error is least for the mean of all that may come, which is a blur, and a rollout
blurs its own blur on: 64 free frames of the first run kept a fifth of the truth's edges. The
critic sees a chunk with its keys, after the frame that the history shows before it, and says where
it is not like a true one. Where that frame is another room than the truth's, it is withheld while
the critic learns, from true chunks too: it would give the fake away by itself, and a true chunk
does not go on from it. What it has learned elsewhere (faded true frames among it) then still says
whether an invented chunk goes on from the frame before as the keys ask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from quantwm.worlds.embedded.config import KEYS, TransformerConfig


class Critic(nn.Module):
    """Chunk, its keys and the frame before -> a map of scores; spectral norms keep it smooth."""

    def __init__(self, config: TransformerConfig, width: int = 128) -> None:
        super().__init__()
        per_chunk = config.frames_per_chunk
        channels = config.latent_channels * (per_chunk + 1) + per_chunk * len(KEYS)
        self.net = nn.Sequential(
            spectral_norm(nn.Conv2d(channels, width, 3, padding=1)),
            nn.SiLU(),
            spectral_norm(nn.Conv2d(width, width, 3, padding=1)),
            nn.SiLU(),
            spectral_norm(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)),
            nn.SiLU(),
            spectral_norm(nn.Conv2d(2 * width, 2 * width, 3, padding=1)),
            nn.SiLU(),
            spectral_norm(nn.Conv2d(2 * width, 1, 3, padding=1)),
        )

    def forward(self, chunks: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """chunks [N, frames, C, H, W], context of `context_of` -> scores [N, 1, H/2, W/2]."""
        return self.net(torch.cat((chunks.flatten(1, 2), context), dim=1))


def chunks_of(clips: torch.Tensor, per_chunk: int) -> torch.Tensor:
    """Clips [B, T, C, H, W] -> all chunks but each first one, [N, per_chunk, C, H, W]."""
    return clips.unflatten(1, (-1, per_chunk))[:, 1:].flatten(0, 1)


def context_of(
    history: torch.Tensor, keys: torch.Tensor, told: torch.Tensor, per_chunk: int
) -> torch.Tensor:
    """[N, C + 6 * per_chunk, H, W] of all chunks but each first: the frame before in the history,
    as means of 2 x 2 latents so that its sharpness says little, zeros where `told` [B, chunks] says
    that it is withheld, and the chunk's keys."""
    before = history.unflatten(1, (-1, per_chunk))[:, :-1, -1]
    before = (before * told[:, 1:, None, None, None]).flatten(0, 1)
    size = before.shape[-2:]
    before = F.interpolate(F.avg_pool2d(before, 2, ceil_mode=True), size)
    held = keys.unflatten(1, (-1, per_chunk))[:, 1:].flatten(0, 1).flatten(1)
    held = held[:, :, None, None].expand(-1, -1, *before.shape[-2:])
    return torch.cat((before, held.to(before.dtype)), dim=1)


def critic_loss(
    critic: Critic, real: torch.Tensor, fake: torch.Tensor, context: torch.Tensor,
    counts: torch.Tensor, mismatched: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Hinge loss. real, fake: [N, frames, C, H, W]; counts [N]: 1 where the fake is one, else 0.

    mismatched: of `mismatched_contexts`; true chunks there are fakes as well, half as heavy.
    """
    on_real = F.relu(1 - critic(real, context)).mean()
    on_fake = F.relu(1 + critic(fake, context)).mean(dim=(1, 2, 3))
    on_fake = (on_fake * counts).sum() / counts.sum().clamp_min(1)
    if mismatched is None:
        return on_real + on_fake
    wrong, differs = mismatched
    on_wrong = F.relu(1 + critic(real, wrong)).mean(dim=(1, 2, 3))
    return on_real + (on_fake + 0.5 * (on_wrong * differs).sum() / differs.sum().clamp_min(1)) / 1.5


def mismatched_contexts(
    context: torch.Tensor, channels: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts that a true chunk does not go on from, and which of them [N] really differ.

    Half of them have the frame of another chunk before them (one that is told), the other half
    keys of the opposite way: w and s, a and d, left and right exchanged. channels: of a frame.
    """
    before, held = context[:, :channels], context[:, channels:]
    other = before[torch.randperm(len(context), generator=generator, device=context.device)]
    of_frame = torch.rand(len(context), generator=generator, device=context.device) < 0.5
    opposite = held.unflatten(1, (-1, 3, 2)).flip(3).flatten(1, 3)
    told, of_other = (x.abs().amax(dim=(1, 2, 3)) > 0 for x in (before, other))
    frame_differs = told & of_other & (other != before).any(dim=3).any(dim=2).any(dim=1)
    keys_differ = (opposite != held)[:, :, 0, 0].any(dim=1)
    pick = of_frame[:, None, None, None]
    wrong = torch.cat((torch.where(pick, other, before), torch.where(pick, held, opposite)), dim=1)
    return wrong, torch.where(of_frame, frame_differs, keys_differ).float()


def push_lengths(
    error: torch.Tensor, sigma_weight: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """How long the critic's gradient may be for each chunk at share 1: [N].

    error: out - truth of the chunks [N, ...]; sigma_weight [N]. The length of the squared error's
    own gradient, times e / (e + mean e): a chunk that the history determines has a small error
    and is left to it, one that could be many things is not the mean of them all.
    """
    square = error.square().flatten(1).sum(dim=1)
    mean = (square * counts).sum() / counts.sum().clamp_min(1)
    length = 2 * sigma_weight * square.sqrt() / error.numel()
    return length * square / (square + mean).clamp_min(1e-12)


def add_critic_gradient(
    critic: Critic, out: torch.Tensor, loss: torch.Tensor, clean: torch.Tensor,
    contexts: tuple[torch.Tensor, ...], counts: torch.Tensor, sigma_weight: torch.Tensor,
    share: float,
) -> None:  # fmt: skip
    """Backward through `out` with the loss's gradient plus the critic's: `share` times
    `push_lengths` long in each chunk that counts.

    Measuring the two where they meet, at the predicted latents, makes the weight mean the same
    whatever the critic's scale. The critic is asked in each of `contexts`. out [B, T, C, H, W] is
    part of loss's graph; sigma_weight, counts [N]: of all chunks but each first.
    """
    (gradient,) = torch.autograd.grad(loss, out, retain_graph=True)
    per_chunk = out.shape[1] // (len(counts) // len(out) + 1)
    parts = chunks_of(out.detach(), per_chunk).requires_grad_(True)
    scores = sum(critic(parts, context).float().mean(dim=(1, 2, 3)) for context in contexts)
    (pushed,) = torch.autograd.grad(-(scores * counts).sum(), parts)
    pushed = pushed.float()
    with torch.no_grad():
        length = push_lengths(parts - chunks_of(clean, per_chunk), sigma_weight, counts)
        norm = pushed.flatten(1).norm(dim=1).clamp_min(1e-12)
        pushed = pushed * (share * counts * length / norm)[:, None, None, None, None]
        gradient.unflatten(1, (-1, per_chunk))[:, 1:] += pushed.unflatten(0, (len(out), -1))
    out.backward(gradient)
