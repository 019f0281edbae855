"""One step of the decoder's stage: the critic learns, then the decoder is pushed.

True frames aim at themselves, as in the autoencoder's own training. Latents that the transformer
made up have no truth; there the decoder keeps what it showed before as means of small squares, and
everything finer is left to the critic and to the distribution of edges in true frames.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F

from quantwm.worlds.embedded.autoencoder import Autoencoder, to_signed
from training.picture_critic import (
    PictureCritic,
    PictureCriticConfig,
    critic_hinge,
    edge_distance,
    grid_error,
)
from training.train_autoencoder import energy_error


@dataclass(frozen=True)
class DecoderTraining:
    """true_pairs, drifted_pairs: of a step, two frames in a row each.

    truth: weight of the true frames' own errors; it grows while the autoencoder is near the least
    PSNR that it may have. adversarial: length of the critic's gradient at the drawn pictures over
    that of the truth's errors at weight 1; adversarial_true: the same for pictures of true latents.
    anchor: of means of 8 x 8 pixels. edges: of the distribution of edge strength. grid: of edges
    that lie at the same places of all latents' squares (without it squared steps were 1.8 times as
    large in one of eight columns after 120 steps on a CPU). known: of the truth where a true frame
    showed what is drawn. warmup: share of the minutes in which the critic only learns; ramp: share
    in which its push grows.
    """

    true_pairs: int = 24
    drifted_pairs: int = 32
    lr: float = 2e-4
    critic_lr: float = 4e-4
    warmup_steps: int = 50
    truth: float = 2.0
    adversarial: float = 1.0
    adversarial_true: float = 0.1
    anchor: float = 4.0
    edges: float = 1.0
    grid: float = 1.0
    known: float = 0.5
    mse_weight: float = 2.0
    gradient_weight: float = 0.5
    energy_weight: float = 0.5
    latent_noise: float = 0.03
    ema: float = 0.995
    warmup: float = 0.04
    ramp: float = 0.12
    critic: PictureCriticConfig = field(default_factory=PictureCriticConfig)


@dataclass(frozen=True)
class DecoderBatch:
    """What a step reads; the tensors stay in place and are filled before every step.

    true: uint8 [P, 2, H, W, 3]. drifted: latents [Q, 2, C, h, w]; shown: the truth at those
    frames, uint8 [Q, 2, H, W, 3]; squares: means of 4 x 4 pixels of what the decoder drew of the
    latents at first, float32 [Q, 2, 3, H/4, W/4]; known: bool [Q, 2, w], columns that a true frame
    of the rollout's context showed.
    """

    true: torch.Tensor
    drifted: torch.Tensor
    shown: torch.Tensor
    squares: torch.Tensor
    known: torch.Tensor

    def fill(self, other: DecoderBatch) -> None:
        for f in fields(self):
            getattr(self, f.name).copy_(getattr(other, f.name))


def reconstruction_loss(
    out: torch.Tensor, target: torch.Tensor, config: DecoderTraining
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures float32 [N, 3, H, W] -> (the autoencoder's own loss, mean squared error)."""
    error = out - target
    mse = error.square().mean()
    across, down = error.diff(dim=3).abs().mean(), error.diff(dim=2).abs().mean()
    loss = error.abs().mean() + config.mse_weight * mse + config.gradient_weight * (across + down)
    return loss + config.energy_weight * energy_error(out, target), mse.detach()


def anchor_error(out: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """out [N, 3, H, W], squares [N, 3, H/4, W/4] -> mean difference of the means of 8 x 8 pixels,
    every 4 pixels: squares that do not overlap would leave their borders free."""
    off = F.avg_pool2d(out, 4) - squares
    return F.avg_pool2d(off, 2, stride=1).abs().mean()


def known_error(
    out: torch.Tensor, shown: torch.Tensor, squares: torch.Tensor, known: torch.Tensor
) -> torch.Tensor:
    """Mean absolute error to the truth where it is known and where what was drawn agreed with it as
    means of 4 x 4 pixels to 1/20: the pose knows no walls, so a column said to be known may show
    another place. out, shown [N, 3, H, W]; squares [N, 3, H/4, W/4]; known [N, w]."""
    agreed = (F.avg_pool2d(shown, 4) - squares).abs().amax(dim=1, keepdim=True) < 0.1
    columns = known[:, :, None].expand(-1, -1, squares.shape[-1] // known.shape[-1]).flatten(1)
    trusted = F.interpolate((agreed & columns[:, None, None]).float(), scale_factor=4.0)
    return ((out - shown).abs() * trusted).mean()


def critic_push(critic: PictureCritic, pictures: torch.Tensor) -> torch.Tensor:
    """Pairs [N, 2, 3, H, W] -> gradient of what the critic says against them, float32, the same
    shape; its length means nothing."""
    pictures = pictures.detach().requires_grad_(True)
    score = torch.stack([s.float().mean() for s in critic(pictures)]).sum()
    (pushed,) = torch.autograd.grad(-score, pictures)
    return pushed.float()


def push_scales(
    error: torch.Tensor, pushed: torch.Tensor, shares: tuple[float, float]
) -> list[torch.Tensor]:
    """Factors that make the pushes of the true pictures and of the others `shares` times as long as
    the error's gradient is, for the same number of pictures.

    error: [P, 3, H, W], gradient of the true pictures' loss; pushed: [P + Q, 3, H, W]. Both losses
    are means over their pictures. Measured where they meet, a share means the same whatever the
    critic's scale.
    """
    count = len(error)
    length = error.norm() * count**0.5
    scales = []
    for part, share in zip((pushed[:count], pushed[count:]), shares, strict=True):
        scales.append(share * length / (len(part) ** 0.5 * part.norm().clamp_min(1e-12)))
    return scales


class DecoderTrainer:
    """Decoder, its average, the critic, both optimisers, and a step on a batch that stays."""

    def __init__(
        self, model: Autoencoder, config: DecoderTraining, batch: DecoderBatch, seed: int
    ) -> None:
        """model: float32, on the batch's device. Only its decoder is trained."""
        device = batch.true.device
        self.frames, self.batch, self._config = batch.true, batch, config
        self.on_gpu = device.type == "cuda"
        self.model = model.requires_grad_(False).train()
        model.decoder.requires_grad_(True)
        self.average = copy.deepcopy(model).requires_grad_(False)
        with torch.random.fork_rng(devices=[device] if self.on_gpu else []):
            torch.manual_seed(seed)
            critic = PictureCritic(config.critic)
        self.critic = critic.to(device, memory_format=torch.channels_last)
        self._adversarial = torch.zeros((), device=device)
        self._truth = torch.full((), config.truth, device=device)
        self._rates = [torch.tensor(rate, device=device) for rate in self._peaks]
        self._adam, self._critic_adam = (
            torch.optim.AdamW(
                parameters, lr=rate if self.on_gpu else float(rate), betas=betas, weight_decay=0.0,
                fused=self.on_gpu, capturable=self.on_gpu,
            )
            for parameters, rate, betas in (
                (list(model.decoder.parameters()), self._rates[0], (0.5, 0.95)),
                (list(self.critic.parameters()), self._rates[1], (0.0, 0.99)),
            )
        )  # fmt: skip

    @property
    def _peaks(self) -> tuple[float, float]:
        return self._config.lr, self._config.critic_lr

    def set_rates(self, decoder: float, critic: float, push: float) -> None:
        """Factors of the peak rates, and of the critic's push: 0 while it alone learns."""
        for tensor, adam, peak, factor in zip(
            self._rates, (self._adam, self._critic_adam), self._peaks, (decoder, critic),
            strict=True,
        ):  # fmt: skip
            if self.on_gpu:
                tensor.fill_(peak * factor)
            else:
                adam.param_groups[0]["lr"] = peak * factor
        self._adversarial.fill_(push)

    def heed_truth(self, factor: float, most: float) -> float:
        """Multiplies the weight of the true frames' errors, up to `most`; returns it."""
        weight = min(float(self._truth) * factor, most)
        self._truth.fill_(weight)
        return weight

    def keep(self) -> None:
        """Remembers decoder, average and critic as they are."""
        self._kept = [tensor.detach().clone() for tensor in self._tensors()]

    def back(self) -> None:
        """To what was kept; both optimisers forget what they saw. In place, as a captured step
        needs it."""
        with torch.no_grad():
            for tensor, kept in zip(self._tensors(), self._kept, strict=True):
                tensor.copy_(kept)
            for adam in (self._adam, self._critic_adam):
                for state in adam.state.values():
                    for value in state.values():
                        value.zero_()

    def _tensors(self) -> list[torch.Tensor]:
        models = (self.model.decoder, self.average.decoder, self.critic)
        return [tensor for model in models for tensor in model.state_dict().values()]

    def _raw(self, latents: torch.Tensor) -> torch.Tensor:
        """Normalised latents [N, C, h, w] -> what the decoder reads."""
        deviation, mean = (
            x.view(1, -1, 1, 1) for x in (self.model.latent_std, self.model.latent_mean)
        )
        return latents.float() * deviation + mean

    def step(self) -> tuple[torch.Tensor, ...]:
        """Loss, mean squared error of true frames, the anchor's error, edges at the grid, distance
        of edges, the critic's loss and share of right scores. Never waits for the device."""
        config, batch = self._config, self.batch
        true, shown = to_signed(batch.true.flatten(0, 1)), to_signed(batch.shown.flatten(0, 1))
        cast = torch.autocast(self.frames.device.type, torch.bfloat16, enabled=self.on_gpu)
        count = len(true)
        with cast:
            with torch.no_grad():
                raw = self.model.encoder(true).float()
                raw = raw + config.latent_noise * torch.randn_like(raw)
            made = self._raw(batch.drifted.flatten(0, 1))
            out = self.model.decoder(torch.cat((raw, made))).float()
        fake = out.detach().unflatten(0, (-1, 2))
        real = torch.cat((true, shown)).unflatten(0, (-1, 2))
        with cast:
            hinge, right = critic_hinge(self.critic, real, fake)
        hinge.backward()
        self._critic_adam.step()
        self._critic_adam.zero_grad(set_to_none=True)
        drawn, squares = out[count:], batch.squares.flatten(0, 1)
        rebuilt, mse = reconstruction_loss(out[:count], true, config)
        coarse, grid = anchor_error(drawn, squares), grid_error(drawn)
        edges = edge_distance(drawn, shown)
        known = known_error(drawn, shown, squares, batch.known.flatten(0, 1))
        loss = self._truth * rebuilt + config.anchor * coarse + config.grid * grid
        loss = loss + config.edges * edges + config.known * known
        (gradient,) = torch.autograd.grad(loss, out, retain_graph=True)
        with cast:
            pushed = critic_push(self.critic, fake).flatten(0, 1)
        shares = (config.adversarial_true, config.adversarial)
        scales = push_scales(gradient[:count] / self._truth, pushed, shares)
        for part, scale in zip((slice(count), slice(count, None)), scales, strict=True):
            gradient[part] += pushed[part] * (scale * self._adversarial)
        out.backward(gradient)
        torch.nn.utils.clip_grad_norm_(self.model.decoder.parameters(), 1.0)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.decoder.parameters()), list(self.model.decoder.parameters()),
                1 - config.ema,
            )  # fmt: skip
        return (
            loss.detach(),
            mse,
            coarse.detach(),
            grid.detach(),
            edges.detach(),
            hinge.detach(),
            right,
        )
