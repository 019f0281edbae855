"""Cache formats by name; `make_format` builds one from plain settings."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from quantwm.cache.formats import bf16, kivi, qtc, quantwm, qvg, qvg_pro, rtn
from quantwm.cache.formats.base import Codebook, Format, QueryGuide, Role
from quantwm.errors import UserError

FORMATS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "bf16": (bf16.Bf16Format, bf16.Bf16Config, bf16.PRESETS),
    "rtn": (rtn.RtnFormat, rtn.RtnConfig, rtn.PRESETS),
    "kivi": (kivi.KiviFormat, kivi.KiviConfig, kivi.PRESETS),
    "qvg": (qvg.QvgFormat, qvg.QvgConfig, qvg.PRESETS),
    "qvg-pro": (qvg_pro.QvgProFormat, qvg_pro.QvgProConfig, qvg_pro.PRESETS),
    "qtc": (qtc.QtcFormat, qtc.QtcConfig, qtc.PRESETS),
    "quantwm": (quantwm.QuantWMFormat, quantwm.QuantWMConfig, quantwm.PRESETS),
}
"""name -> (format, its config, its presets). A new format adds its line here."""


def split_method(method: str) -> tuple[str, dict[str, object]]:
    """A method as a format name and settings for `make_format`.

    "name", "name:preset", "name:setting=value,..." or "name:preset,setting=value,...".
    Raises UserError when a part behind the colon is neither.
    """
    name, colon, rest = method.partition(":")
    settings: dict[str, object] = {}
    for place, part in enumerate(rest.split(",") if colon else ()):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not equals and place == 0:
            key, text = "preset", key
        if not key or not text or key in settings:
            raise UserError(
                f"method {method[:60]!r}: write name, name:preset or name:setting=value, each "
                "setting once"
            )
        settings[key] = text if key == "preset" else _plain_value(text)
    return name, settings


def split_methods(text: str) -> tuple[str, ...]:
    """A comma-separated list of methods; settings belong to the method before them:
    "bf16, quantwm:rank=4,clip=0.7, qvg" are three."""
    methods: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if methods and "=" in part and ":" not in part:
            methods[-1] += f",{part}"
        elif part:
            methods.append(part)
    return tuple(methods)


def takes(name: str, setting: str) -> bool:
    """Whether a format of this name has a setting of this name."""
    return name in FORMATS and any(f.name == setting for f in fields(FORMATS[name][1]))


def _plain_value(text: str) -> object:
    """The value of a setting as written: true or false, a number, or the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
        "str": isinstance(value, str),
    }[str(wanted)]
    if not right:
        raise UserError(f"{name} setting {key} must be {wanted}, got {value!r}")


__all__ = [
    "FORMATS",
    "Codebook",
    "Format",
    "QueryGuide",
    "Role",
    "make_format",
    "split_method",
    "split_methods",
    "takes",
]
