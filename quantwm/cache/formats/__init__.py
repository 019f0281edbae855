"""Cache formats by name; `make_format` builds one from plain settings."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from quantwm.cache.formats import bf16, qtc, quantwm, qvg
from quantwm.cache.formats.base import Codebook, Format, QueryGuide, Role
from quantwm.errors import UserError

FORMATS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "bf16": (bf16.Bf16Format, bf16.Bf16Config, bf16.PRESETS),
    "qvg": (qvg.QvgFormat, qvg.QvgConfig, qvg.PRESETS),
    "qtc": (qtc.QtcFormat, qtc.QtcConfig, qtc.PRESETS),
    "quantwm": (quantwm.QuantWMFormat, quantwm.QuantWMConfig, quantwm.PRESETS),
}
"""name -> (format, its config, its presets). A new format adds its line here."""


def split_method(method: str) -> tuple[str, dict[str, object]]:
    """A method, "name" or "name:preset", as a format name and settings for `make_format`."""
    name, colon, preset = method.partition(":")
    return name, {"preset": preset} if colon else {}


def make_format(name: str, **settings: object) -> Format[Any]:
    """A format with these settings; `preset` names the ones to start from.

    Raises UserError on an unknown name, preset or setting, and on a bad value.
    """
    if name not in FORMATS:
        raise UserError(f"unknown cache format {name!r}; there are: {', '.join(FORMATS)}")
    kind, config_kind, presets = FORMATS[name]
    preset = settings.pop("preset", None)
    if preset is not None and preset not in presets:
        raise UserError(f"unknown {name} preset {preset!r}; there are: {', '.join(presets)}")
    known = {f.name: f for f in fields(config_kind)}
    for key, value in settings.items():
        if key not in known:
            offered = ", ".join(known) or "none"
            raise UserError(f"{name} has no setting {key!r}; there are: {offered}")
        _check_type(name, key, value, known[key].type)
    start = presets[preset] if preset is not None else config_kind()
    return kind(replace(start, **settings))


def _check_type(name: str, key: str, value: object, wanted: object) -> None:
    right = {
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
    }[str(wanted)]
    if not right:
        raise UserError(f"{name} setting {key} must be {wanted}, got {value!r}")


__all__ = ["FORMATS", "Codebook", "Format", "QueryGuide", "Role", "make_format", "split_method"]
