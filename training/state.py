"""The state of a training of the transformer: weights, their average, optimisers, the critic."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantwm.errors import UserError
from quantwm.worlds.embedded.autoencoder import Autoencoder
from quantwm.worlds.embedded.config import TransformerConfig
from quantwm.worlds.embedded.transformer import Transformer
from quantwm.worlds.embedded.weights import load_models, read_manifest
from training.critic import Critic
from training.evaluate import shipped_copy
from training.losses import TransformerTraining
from training.muon import Muon


def load_teacher(folder: Path, autoencoder: Autoencoder, device: torch.device) -> Transformer:
    """Exported weights as a teacher. UserError when their latents are not of `autoencoder`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    teacher, theirs = load_models(read_manifest(folder), device, dtype)
    mine, other = autoencoder.state_dict(), theirs.state_dict()
    if mine.keys() != other.keys() or any(
        mine[name].shape != other[name].shape
        or not torch.equal(mine[name].to(torch.bfloat16), other[name].to(torch.bfloat16))
        for name in mine
    ):
        raise UserError(
            f"the teacher in {folder} has another autoencoder; give one that shares this run's, "
            "and --ae-share 0"
        )
    return teacher.requires_grad_(False).eval()


@dataclass
class TrainState:
    """Everything that a checkpoint holds; progress: share of the schedule's time that is over."""

    model: Transformer
    average: Transformer
    muon: Muon
    adam: torch.optim.AdamW
    step: int = 0
    progress: float = 0.0
    runs: list[dict[str, Any]] = field(default_factory=list)

    critic: Critic | None = None
    critic_adam: torch.optim.AdamW | None = None
    teacher: Transformer | None = None

    @classmethod
    def fresh(
        cls, config: TransformerConfig, training: TransformerTraining, seed: int,
        device: torch.device,
    ) -> TrainState:  # fmt: skip
        model = Transformer(config)
        model.init_weights(torch.Generator().manual_seed(seed))
        model = model.to(device)
        average = copy.deepcopy(model).requires_grad_(False)
        matrices = [
            p for name, p in model.blocks.named_parameters() if p.ndim == 2 and "table" not in name
        ]
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        adam = torch.optim.AdamW(
            rest, lr=training.adam_lr, betas=(0.9, 0.95), weight_decay=0.0,
            fused=device.type == "cuda",
        )  # fmt: skip
        return cls(model, average, Muon(matrices, lr=training.muon_lr), adam)

    def save(self, path: Path) -> None:
        """Whole or not at all: written beside, then renamed."""
        partial = path.with_suffix(".part")
        torch.save(
            {
                "model": self.model.state_dict(), "average": self.average.state_dict(),
                "muon": self.muon.state_dict(), "adam": self.adam.state_dict(),
                "step": self.step, "progress": self.progress, "runs": self.runs,
            },
            partial,
        )  # fmt: skip
        partial.replace(path)

    def load(self, path: Path) -> None:
        """UserError when the file is missing, damaged or of another model."""
        if not path.is_file():
            raise UserError(f"checkpoint {path} does not exist; leave out --resume to start afresh")
        try:
            data = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f"checkpoint {path} is damaged; leave out --resume to start afresh"
            ) from error
        try:
            self.model.load_state_dict(data["model"])
            self.average.load_state_dict(data["average"])
            self.muon.load_state_dict(data["muon"])
            self.adam.load_state_dict(data["adam"])
        except (KeyError, RuntimeError, ValueError) as error:
            line = str(error).splitlines()[0]
            raise UserError(f"checkpoint {path} is of another model: {line}") from error
        self.step, self.runs = data["step"], data["runs"]
        self.progress = data.get("progress", 0.0)

    def start_from(self, model: Transformer) -> None:
        """Takes over exported weights, the average of an earlier run; optimisers start anew.

        Weights of a model that was not told poses lack one matrix, which stays zero: the same
        model at first.
        """
        for mine in (self.model, self.average):
            left = mine.load_state_dict(model.state_dict(), strict=False)
            if left.unexpected_keys or set(left.missing_keys) - {"pose_in.weight"}:
                raise UserError(
                    f"the weights are of another model: {left.missing_keys or left.unexpected_keys}"
                )

    def need_critic(self, rate: float, seed: int) -> Critic:
        """The critic, made at its first use; it is no part of a checkpoint."""
        if self.critic is None:
            device = self.model.patch_in.weight.device
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                self.critic = Critic(self.model.config).to(device)
            self.critic_adam = torch.optim.AdamW(
                self.critic.parameters(), lr=rate, betas=(0.0, 0.99), weight_decay=0.0,
                fused=device.type == "cuda",
            )  # fmt: skip
        return self.critic

    def need_teacher(self) -> Transformer:
        """The one that was given, or the average as it was when it was first asked for, as it would
        ship; it is no part of a checkpoint."""
        if self.teacher is None:
            self.teacher = shipped_copy(self.average)
        return self.teacher

    def clear_gradients(self) -> None:
        self.muon.zero_grad(set_to_none=True)
        self.adam.zero_grad(set_to_none=True)

    def update_average(self, decay: float) -> None:
        decay = min(decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.average.parameters()), list(self.model.parameters()), 1 - decay
            )
