"""CUDA graphs of a causal Wan pass: everything between two attentions is one launch.

Matrix-Game-2 spent 385 ms on a chunk on one H200 whose arithmetic takes under 100: the host could
not launch its small operations fast enough. What depends on the length of the history, the three
attentions and their caches, stays outside; all else has one shape and is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quantwm.cache.capture import Capture
from quantwm.worlds.wan.action_module import (
    ActionModule,
    ActionPass,
    keyboard_attention,
    mouse_attention,
)
from quantwm.worlds.wan.attention import AbsoluteAttention
from quantwm.worlds.wan.backbone import Block, CausalWan, ContextKV, Pass, Vectors

WORTHWHILE_FLOPS = 1.5e12
"""A layer's arithmetic for one chunk up to which graphs help: about 4 ms on an H200, as long as a
slow host takes for the layer's hundred launches. Above, the device is busy anyway."""

Head = Callable[[], torch.Tensor]
"""Computes the stream [N, width] from static tensors."""
Outside = Callable[[Pass], None]
"""What runs between two graphs."""


def worthwhile(model: CausalWan, tokens: int) -> bool:
    """Whether launching costs as much as computing a chunk of so many tokens."""
    weights = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    return 2 * weights * tokens <= WORTHWHILE_FLOPS


class GraphedWan:
    """`CausalWan.forward` with the same result; chunks of `frames` latent frames are replayed.

    The static tensors belong to one world; lanes and engines take turns.
    """

    def __init__(self, model: CausalWan, frames: int, capture: Capture) -> None:
        self.model, self.frames, self._capture = model, frames, capture
        self._passes: dict[tuple[object, ...], _GraphedPass] = {}

    def __call__(self, latents: torch.Tensor, inputs: Pass) -> torch.Tensor:
        if latents.shape[1] != self.frames:
            return self.model(latents, inputs)  # a memory of any length, once per chunk
        key = _kind(latents, inputs)
        if key not in self._passes:
            self._passes[key] = _GraphedPass(self.model, latents, inputs, self._capture)
        return self._passes[key](latents, inputs)

    @property
    def count(self) -> int:
        """Graphs made so far."""
        return sum(len(made.pieces) for made in self._passes.values())


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """Zeros like x [heads, N, D] that lie as [N, heads, D]."""
    return torch.zeros_like(x.transpose(0, 1).contiguous()).transpose(0, 1)


def _kind(latents: torch.Tensor, inputs: Pass) -> tuple[object, ...]:
    """What must be alike for two passes to share graphs."""
    action = inputs.action
    return (
        tuple(latents.shape),
        inputs.attention.turns is None,
        inputs.context[0][0].shape[1],
        inputs.camera is None,
        inputs.labels is None,
        None if action is None else action.mouse is None,
    )


class _GraphedPass:
    """The graphs of one kind of pass and the static tensors between them.

    `pieces` are run in order: a graph, then what happens outside before the next.
    """

    def __init__(
        self, model: CausalWan, latents: torch.Tensor, inputs: Pass, capture: Capture
    ) -> None:
        self._model, self._capture = model, capture
        self._held: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._source: ContextKV | None = None
        self._context: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._grid = (latents.shape[1], latents.shape[2] // 2, latents.shape[3] // 2)
        # All blocks' tables together: their modulation is one addition a pass.
        self._tables = torch.cat([block.scale_shift_table for block in model.blocks])
        self._fill(latents, inputs)
        tokens = self._grid[0] * self._grid[1] * self._grid[2]
        config = model.config
        shape = (tokens, config.heads, config.head_dim)
        branches = 2 if config.prope else 1
        # Heads of a token side by side, so that joining them moves nothing.
        blank = torch.zeros(shape, dtype=model.dtype, device=model.device).transpose(0, 1)
        self._attended = [self._put(f"attended {index}", blank) for index in range(branches)]
        self.pieces: list[tuple[Callable[[], None], Outside]] = []
        self._build(inputs)

    def __call__(self, latents: torch.Tensor, inputs: Pass) -> torch.Tensor:
        self._fill(latents, inputs)
        if isinstance(inputs.attention, AbsoluteAttention):
            inputs.attention.lasting = True
        for replay, outside in self.pieces:
            replay()
            outside(inputs)
        return self._flow.clone()

    def _put(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Copy a value into the static tensor of its name and dtype, made like it when new."""
        key = (name, value.dtype)
        if key not in self._held:
            with torch.inference_mode(False):
                self._held[key] = torch.empty_like(value)
        return self._held[key].copy_(value)

    def _fill(self, latents: torch.Tensor, inputs: Pass) -> None:
        """The pass's inputs into the static tensors that the graphs read."""
        self._latents = self._put("latents", latents)
        self._times = self._put("timesteps", inputs.timesteps)
        turns = inputs.attention.turns
        if turns is not None:
            turns = self._put("cos", turns[0]), self._put("sin", turns[1])
        self._turns = turns
        self._camera = None if inputs.camera is None else self._put("camera", inputs.camera)
        self._labels = None if inputs.labels is None else self._put("labels", inputs.labels)
        if inputs.action is not None:
            self._fill_action(inputs.action)
        if inputs.context is not self._source:
            if not self._context:
                with torch.inference_mode(False):
                    self._context = [
                        (torch.empty_like(k), torch.empty_like(v)) for k, v in inputs.context
                    ]
            for held, given in zip(self._context, inputs.context, strict=True):
                for mine, new in zip(held, given, strict=True):
                    mine.copy_(new)
            self._source = inputs.context

    def _fill_action(self, action: ActionPass) -> None:
        self._keyboard = self._put("keyboard", action.keyboard)
        self._mouse = None if action.mouse is None else self._put("mouse", action.mouse)
        cos, sin = action.turns
        self._action_turns = (self._put("action cos", cos), self._put("action sin", sin))

    # Building -------------------------------------------------------------------------------

    def _build(self, inputs: Pass) -> None:
        blocks: Sequence[Block] = self._model.blocks
        self._add(self._enter, lambda passed: self._attend(0, passed))
        for layer, block in enumerate(blocks):
            x = self._stream
            if inputs.action is None or not block.acts:
                self._add_last(layer, partial(self._after, layer, x))
                continue
            self._add_action(layer, block, x)

    def _add(self, segment: Callable[[], None], outside: Outside) -> None:
        def whole() -> tuple[torch.Tensor, ...]:
            segment()
            return ()

        with torch.no_grad():
            _, replay = self._capture(whole)
        self.pieces.append((replay, outside))

    def _add_last(self, layer: int, head: Head) -> None:
        """The block's last piece: `head`, the feed-forward, and the next block up to its q, k, v
        or the way out."""
        last = layer == len(self._model.blocks) - 1

        def segment() -> None:
            x = self._model.blocks[layer].finish(head(), self._vectors(layer))
            if last:
                self._flow = self._put("flow", self._model.leave(x, self._time, self._grid))
            else:
                self._before(layer + 1, x)

        def outside(inputs: Pass) -> None:
            if not last:
                self._attend(layer + 1, inputs)

        self._add(segment, outside)

    def _add_action(self, layer: int, block: Block, x: torch.Tensor) -> None:
        """A block with an action module: cut at its two attentions over time."""
        module = block.action_model
        entered: Head = partial(self._after, layer, x)
        if self._mouse is not None and module.has_mouse:
            entered = self._add_mouse(module, block.action_index, entered)
        stream, attended = self._add_keyboard(module, block.action_index, entered)
        self._add_last(layer, lambda: stream + module.keyboard_out(attended))

    def _add_mouse(self, module: ActionModule, index: int, entered: Head) -> Head:
        """Up to the mouse's attention; returns the stream with its result added."""

        def segment() -> None:
            x = entered()
            self._stream = self._put("x", x)
            self._put_qkv("mouse", module.mouse_in(x, self._mouse, self._action_turns))

        def outside(inputs: Pass) -> None:
            history = inputs.action.mouse_history
            out = mouse_attention(*self._qkv("mouse"), self._grid[0], index, history)
            self._put("mouse attended", out)

        self._add(segment, outside)
        stream = self._stream
        attended = self._put("mouse attended", _side_by_side(self._qkv("mouse")[0]))
        return lambda: stream + module.mouse_out(attended)

    def _add_keyboard(
        self, module: ActionModule, index: int, entered: Head
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to the keyboard's attention; returns the stream and what it attended."""

        def segment() -> None:
            x = entered()
            self._stream = self._put("x", x)
            qkv = module.keyboard_in(x, self._keyboard, self._action_turns)
            self._put_qkv("keyboard", qkv)

        def outside(inputs: Pass) -> None:
            history = inputs.action.keyboard_history
            out = keyboard_attention(*self._qkv("keyboard"), index, history)
            self._put("keyboard attended", out)

        self._add(segment, outside)
        blank = _side_by_side(self._qkv("keyboard")[0])
        return self._stream, self._put("keyboard attended", blank)

    # Pieces ---------------------------------------------------------------------------------

    def _enter(self) -> None:
        time, modulation = self._model.times(self._times, self._labels)
        self._time = self._put("time", time)
        rules = self._model.config.rules
        tables = self._tables.float() if rules.modulation_fp32 else self._tables
        self._rows = self._put("modulation", tables[:, None] + modulation)
        self._before(0, self._model.enter(self._latents))

    def _before(self, layer: int, x: torch.Tensor) -> None:
        block = self._model.blocks[layer]
        self._stream = self._put("x", x)
        self._put_qkv("self", block.before(x, self._vectors(layer), self._turns))

    def _after(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        block = self._model.blocks[layer]
        vectors, context = self._vectors(layer), self._context[layer]
        return block.after(x, self._attended, vectors, context, self._camera)

    def _vectors(self, layer: int) -> Vectors:
        """As `Block.vectors` makes them."""
        return self._rows[layer][:, :, None].unbind(1)

    def _attend(self, layer: int, inputs: Pass) -> None:
        attended = inputs.attention(layer, *self._qkv("self"))
        for held, out in zip(self._attended, attended, strict=True):
            held.copy_(out)

    def _put_qkv(self, of: str, qkv: Sequence[torch.Tensor]) -> None:
        for name, value in zip("qkv", qkv, strict=True):
            self._put(f"{of} {name}", value)

    def _qkv(self, of: str) -> list[torch.Tensor]:
        dtype = self._model.dtype
        return [self._held[f"{of} {name}", dtype] for name in "qkv"]
