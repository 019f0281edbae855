"""Public code to compare with, used from a checkout that the caller points to; none is vendored."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor


class _Silent:
    """A logger whose every method takes anything and says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


SILENT: dict[str, dict[str, Any]] = {
    "loguru": {"logger": _Silent()},
    "termcolor": {"cprint": lambda *args, **kwargs: None},
}
"""What the peer prints with. None of it computes, so that its code runs as published without."""


@contextmanager
def silent_where_missing() -> Iterator[list[str]]:
    """The modules of SILENT that are not installed, standing in while it lasts; their names."""
    stood_in = []
    for name, attributes in SILENT.items():
        try:
            importlib.import_module(name)
        except ImportError:
            module = ModuleType(name)
            vars(module).update(attributes)
            sys.modules[name] = module
            stood_in.append(name)
    try:
        yield stood_in
    finally:
        for name in stood_in:
            del sys.modules[name]


class QuantVideoGen:
    """svg-project/Quant-VideoGen: its packed INT2 path with one stage and groups of 64.

    stood_in: modules for printing that were missing and stood in for, so that nothing is printed.
    """

    def __init__(self, checkout: Path, centroids: int, group_size: int, iterations: int) -> None:
        """ImportError when the folder does not hold the package or one of its needs is missing."""
        if not (checkout / "quant_videogen" / "__init__.py").is_file():
            raise ImportError(f"no quant_videogen package in {checkout}")
        sys.path.insert(0, str(checkout))
        try:
            with silent_where_missing() as self.stood_in:
                package: Any = importlib.import_module("quant_videogen")
        finally:
            sys.path.remove(str(checkout))
        self._package = package
        self._config = package.QuantizeConfig(
            quant_type="triton-nstages-kmeans-int2",
            cache_num_k_centroids=centroids,
            cache_num_v_centroids=centroids,
            kmeans_max_iters=iterations,
            quant_block_size=group_size,
            num_prq_stages=1,
        )
        self._quantize: Callable[..., Any] = package.get_quantize_fn(
            self._config.quant_type, self._config
        )

    def encode(self, keys: Tensor, values: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """keys, values: [H, N, D]."""
        packed = self._package.compress_kv_cache(
            keys.unsqueeze(0), values.unsqueeze(0), self._config.quant_type, self._config,
            self._quantize,
        )  # fmt: skip
        for state in packed:
            state["info"] = {"output_dtype": keys.dtype, "quant_config": self._config}
        return packed

    def decode(self, packed: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """The package's own decode: it allocates what it returns."""
        keys, values = self._package.uncompress_kv_cache(*packed)
        return keys[0], values[0]
