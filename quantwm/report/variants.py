"""The lanes that the report runs: which formats, with which settings, under which names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quantwm.cache.formats import FORMATS, Format, make_format, takes
from quantwm.engine_types import LaneConfig
from quantwm.lanes import lane_format
from quantwm.report.one_role import OneRoleFormat
from quantwm.worlds.base import WorldSpec


@dataclass(frozen=True)
class Variant:
    """One lane of an experiment.

    Attributes:
        name: of the lane; title: for people.
        method, settings: for `make_format`, on top of what the world sets for the format.
        role: what is quantized.
    """

    name: str
    title: str
    method: str
    settings: dict[str, object] = field(default_factory=dict)
    role: Literal["both", "keys", "values"] = "both"

    @property
    def known(self) -> bool:
        """Whether this version has the format and the settings."""
        wanted = (name for name in self.settings if name != "preset")
        return self.method in FORMATS and all(takes(self.method, name) for name in wanted)

    def lane(self, spec: WorldSpec) -> LaneConfig:
        settings = {**spec.format_settings.get(self.method, {}), **self.settings}
        return LaneConfig(self.name, self.method, settings, spec.policy)

    def format(self, spec: WorldSpec) -> Format[Any]:
        return _with_role(lane_format(self.lane(spec)), self.role)


def _quantwm(name: str, title: str, **settings: object) -> Variant:
    return Variant(name, title, "quantwm", settings)


BF16 = Variant("bf16", "BF16", "bf16")
FLOOR = Variant("floor", "noise floor", "bf16", {"second_kernel": True})
"""BF16 through another attention kernel: what a method cannot be told from."""
METHODS = (
    Variant("rtn", "RTN", "rtn"),
    Variant("kivi", "KIVI", "kivi"),
    Variant("qvg", "QVG", "qvg"),
    Variant("qvg-pro", "QVG-Pro", "qvg-pro"),
    Variant("quantwm", "QuantWM", "quantwm"),
    Variant("qtc", "QTC", "qtc"),
)
"""Table 3 and everything that compares caches."""

LANES = (BF16, FLOOR, *METHODS)

ROLES = tuple(
    Variant(f"{method}-{role}", f"{title} {word}", method, role=role)
    for method, title in (("qvg", "QVG"), ("quantwm", "QuantWM"))
    for role, word in (("keys", "K2V16"), ("values", "K16V2"))
)
"""Tables 1 and 2; the third row, K2V2, is the method itself."""

ABLATION = (
    _quantwm("affine", "QVG centroids + affine", qsac=False, psac=False),
    _quantwm("qsac", "QSAC", psac=False),
    _quantwm("psac", "PSAC", qsac=False),
)
"""Table 5, with the row that it lacks: the quantizer alone, without QSAC and PSAC."""

RANKS = tuple(_quantwm(f"rank{r}", f"rank {r}", rank=r) for r in (2, 4, 16, 32))
CANDIDATES = tuple(_quantwm(f"top{m}", f"M = {m}", candidates=m) for m in (1, 2, 16, 64))
FULL = (_quantwm("full", "full moment", full_moment=True),)
SWEEPS = (*RANKS, *CANDIDATES, *FULL)
"""Tables 9, 11 and 10; the published setting (rank 8, M = 4, diagonal) is `quantwm` itself."""

BEYOND = (
    Variant("quantwm", "QuantWM", "quantwm"),
    _quantwm(
        "quantwm-half", "QuantWM, half-measures", keys="unrotated", clip=0.7, coefficients="int4"
    ),
    _quantwm(
        "quantwm-half-corrected",
        "QuantWM, half-measures, corrected scores",
        keys="unrotated",
        clip=0.7,
        coefficients="int4",
        corrected=True,
    ),
    _quantwm("quantwm-corrected", "QuantWM, corrected scores", corrected=True),
    Variant("qtc-small", "QTC, small", "qtc", {"preset": "small"}),
    Variant("qtc", "QTC", "qtc"),
    Variant("qtc-large", "QTC, large", "qtc", {"preset": "large"}),
)
"""The transform code at three budgets beside QuantWM and what its own format can have of it;
docs/beyond.md."""

ALL = {v.name: v for v in (*BEYOND, *LANES, *ROLES, *ABLATION, *SWEEPS)}


def title_of(name: str) -> str:
    """A lane's name for people."""
    return ALL[name].title


def known(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Those that this version has; what is left out is named in the report."""
    return tuple(variant for variant in variants if variant.known)


def format_of(lane: LaneConfig) -> Format[Any]:
    """The format of a lane of the report, for `Engine`: the lane's name says which role."""
    variant = ALL[lane.name]
    return _with_role(make_format(lane.method, **lane.settings), variant.role)


def _with_role(fmt: Format[Any], role: str) -> Format[Any]:
    return fmt if role == "both" else OneRoleFormat(fmt, role)  # type: ignore[return-value,arg-type]
