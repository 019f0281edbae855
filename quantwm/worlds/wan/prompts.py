"""Prompts to text features: the encoder is loaded, used and released again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from quantwm.cache.remedy import gib
from quantwm.errors import UserError
from quantwm.memory import free_bytes
from quantwm.worlds.wan.checkpoint import weight_files
from quantwm.worlds.wan.umt5 import clean_prompt, load_umt5, tokenize

Report = Callable[[str, float], None]
ROOM = 1.15  # of the encoder's size: its activations for 512 tokens and the allocator's slack


class PromptEncoder:
    """Encodes a prompt when it changes. The 11 GB encoder is not kept beside the transformer."""

    def __init__(
        self, weights: Path, tokenizer: Path, weight_bytes: int, device: torch.device, width: int
    ) -> None:
        """weight_bytes: of the encoder, to see whether the device has room for it. width: of the
        features that the transformer takes."""
        self.weights, self.tokenizer, self.device = weights, tokenizer, device
        self.weight_bytes, self.width = weight_bytes, width
        self._newest: tuple[str, torch.Tensor] | None = None

    def __call__(self, prompt: str, report: Report = lambda stage, share: None) -> torch.Tensor:
        """Features of a prompt, [tokens, width], on the world's device."""
        prompt = clean_prompt(prompt)
        if self._newest is None or self._newest[0] != prompt:
            ids = tokenize(prompt, self.tokenizer)
            device = self._roomy_device()
            encoder = load_umt5(
                self.weights, torch.bfloat16, device,
                lambda done, total: report("Loading the text encoder", done / max(total, 1)),
            )  # fmt: skip
            if encoder.config.width != self.width:
                raise UserError(
                    f"the text encoder is of another model: its features have "
                    f"{encoder.config.width} channels, the transformer takes {self.width}"
                )
            report("Reading the prompt", 0.5)
            with torch.inference_mode():
                features = encoder.encode(ids).to(self.device)
            del encoder
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            self._newest = prompt, features
        return self._newest[1]

    def _roomy_device(self) -> torch.device:
        """The world's device if the encoder fits beside what is there, else the CPU; UserError
        where that has no room either."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if free > ROOM * self.weight_bytes:
                return self.device
        cpu = torch.device("cpu")
        files = sum(file.stat().st_size for file in weight_files(self.weights))
        needed, room = min(files, self.weight_bytes), free_bytes(cpu)  # a file may be in FP32
        if room is not None and needed > room:
            raise UserError(
                f"the text encoder needs {gib(needed)} of main memory for a moment and {gib(room)} "
                "is free: end what else runs"
            )
        return cpu
