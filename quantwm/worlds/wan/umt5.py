"""The UMT5 text encoder of the Wan models, from its original names or transformers'."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from quantwm.errors import UserError
from quantwm.worlds.wan.checkpoint import Weights, open_weights, shape_of
from quantwm.worlds.wan.loading import Progress, assign, on_meta

EPS = 1e-6
MAX_DISTANCE = 128
MAX_TOKENS = 512
MAX_CHARACTERS = 4_000  # of a prompt; 512 tokens are read of it in any case


@dataclass(frozen=True)
class Umt5Config:
    """Sizes; the defaults are umt5-xxl."""

    vocabulary: int = 256384
    width: int = 4096
    attention_width: int = 4096
    ffn_dim: int = 10240
    heads: int = 64
    layers: int = 24
    buckets: int = 32


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x * torch.rsqrt(x.float().pow(2).mean(dim=-1, keepdim=True) + EPS)
        return self.weight * wide.to(self.weight.dtype)


class _Attention(nn.Module):
    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.heads = config.heads
        width, inner = config.width, config.attention_width
        self.q = nn.Linear(width, inner, bias=False)
        self.k = nn.Linear(width, inner, bias=False)
        self.v = nn.Linear(width, inner, bias=False)
        self.o = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x: [B, N, C]; bias: [B, heads, N, N]. T5 does not scale its scores."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) + bias
        out = F.softmax(scores.float(), dim=-1).to(x.dtype) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.gate = nn.ModuleList([nn.Linear(config.width, config.ffn_dim, bias=False)])
        self.fc1 = nn.Linear(config.width, config.ffn_dim, bias=False)
        self.fc2 = nn.Linear(config.ffn_dim, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate[0](x)
        # Written out, because in BF16 every operation of it is rounded.
        inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
        return self.fc2(self.fc1(x) * (0.5 * gate * (1.0 + torch.tanh(inner))))


class _Positions(nn.Module):
    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.buckets = config.buckets
        self.embedding = nn.Embedding(config.buckets, config.heads)

    def forward(self, count: int) -> torch.Tensor:
        """[1, heads, count, count]: a learned bias by bucketed distance, per block in UMT5."""
        positions = torch.arange(count, device=self.embedding.weight.device)
        distance = positions[None] - positions[:, None]
        half = self.buckets // 2
        exact = half // 2
        size = distance.abs()
        ratio = torch.log(size.float().clamp(min=1) / exact) / math.log(MAX_DISTANCE / exact)
        far = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        bucket = (distance > 0).long() * half + torch.where(size < exact, size, far)
        return self.embedding(bucket).permute(2, 0, 1)[None]


class _Block(nn.Module):
    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.norm1 = _Norm(config.width)
        self.attn = _Attention(config)
        self.norm2 = _Norm(config.width)
        self.ffn = _FeedForward(config)
        self.pos_embedding = _Positions(config)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        bias = self.pos_embedding(x.shape[1]).masked_fill(hidden, torch.finfo(x.dtype).min)
        x = x + self.attn(self.norm1(x), bias)
        return x + self.ffn(self.norm2(x))


class Umt5Encoder(nn.Module):
    """Token ids and mask to text features."""

    def __init__(self, config: Umt5Config) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList([_Block(config) for _ in range(config.layers)])
        self.norm = _Norm(config.width)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """ids, mask: [B, N] -> [B, N, width], rows beyond the mask zero."""
        x = self.token_embedding(ids)
        hidden = (mask == 0)[:, None, None]
        for block in self.blocks:
            x = block(x, hidden)
        return self.norm(x) * mask[..., None].to(x.dtype)

    def encode(self, ids: list[int]) -> torch.Tensor:
        """One prompt's ids -> [tokens, width]; no padding, so nothing is masked."""
        device = self.norm.weight.device
        if max(ids, default=0) >= self.config.vocabulary:
            raise UserError(
                f"the tokenizer is of another text encoder: it makes token {max(ids)}, this one "
                f"knows {self.config.vocabulary}"
            )
        row = torch.tensor([ids[:MAX_TOKENS]], device=device)
        return self(row, torch.ones_like(row))[0]


_FROM_TRANSFORMERS = (
    (r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.([qkvo])\.", r"blocks.\1.attn.\2."),
    (r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias\.",
     r"blocks.\1.pos_embedding.embedding."),
    (r"encoder\.block\.(\d+)\.layer\.0\.layer_norm\.", r"blocks.\1.norm1."),
    (r"encoder\.block\.(\d+)\.layer\.1\.layer_norm\.", r"blocks.\1.norm2."),
    (r"encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wi_0\.", r"blocks.\1.ffn.gate.0."),
    (r"encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wi_1\.", r"blocks.\1.ffn.fc1."),
    (r"encoder\.block\.(\d+)\.layer\.1\.DenseReluDense\.wo\.", r"blocks.\1.ffn.fc2."),
    (r"encoder\.final_layer_norm\.", "norm."),
    (r"^shared\.", "token_embedding."),
    (r"^encoder\.embed_tokens\.", "token_embedding."),
)  # fmt: skip


def canonical_umt5(weights: Mapping[str, torch.Tensor]) -> Weights:
    """transformers' or original names -> original names; the shared embedding may come twice."""
    out: Weights = {}
    for name, tensor in weights.items():
        for pattern, new in _FROM_TRANSFORMERS:
            name = re.sub(pattern, new, name)
        out[name] = tensor
    return out


def infer_umt5_config(weights: Mapping[str, torch.Tensor]) -> Umt5Config:
    """Sizes of canonical weights."""

    def sizes(name: str) -> tuple[int, ...]:
        return shape_of(weights, name, 2, "a UMT5 encoder")

    vocabulary, width = sizes("token_embedding.weight")
    buckets, heads = sizes("blocks.0.pos_embedding.embedding.weight")
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    attention_width = sizes("blocks.0.attn.q.weight")[0]
    if attention_width % heads:
        raise UserError(f"a UMT5 encoder's attention of {attention_width} is not {heads} heads")
    return Umt5Config(
        vocabulary=vocabulary, width=width, heads=heads, buckets=buckets, layers=len(blocks),
        attention_width=attention_width,
        ffn_dim=sizes("blocks.0.ffn.fc1.weight")[0],
    )  # fmt: skip


def load_umt5(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
) -> Umt5Encoder:
    """models_t5_umt5-xxl-enc-bf16.pth, or a transformers text_encoder folder."""
    weights = canonical_umt5(open_weights(path))
    config = infer_umt5_config(weights)
    encoder = on_meta(lambda: Umt5Encoder(config))
    assign(encoder, weights, "a UMT5 encoder", dtype, device, progress)
    return encoder


def clean_prompt(text: str) -> str:
    """A prompt as the tokenizer gets it; UserError on one that is empty or absurdly long."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"a prompt has at most {MAX_CHARACTERS:,} characters, got {len(text):,}: shorten it"
        )
    if not text.isprintable() and any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        raise UserError("the prompt holds half a character (a lone surrogate); type it again")
    cleaned = re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()
    if not cleaned:
        raise UserError("the prompt is empty: describe what should be seen")
    return cleaned


def tokenize(text: str, folder: Path | str) -> list[int]:
    """Token ids of a prompt, at most MAX_TOKENS, with the tokenizer.json of a local folder."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("prompts need the package tokenizers: pip install tokenizers") from None
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"no tokenizer.json in {folder}")
    prompt = clean_prompt(text)
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.enable_truncation(MAX_TOKENS)
        return tokenizer.encode(prompt).ids
    except Exception as error:  # the package raises plain Exception on a broken file
        raise UserError(f"{file} is not a tokenizer ({str(error)[:120]})") from None
