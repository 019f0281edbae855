"""`download`: fetch a published world's files, after its licence is agreed to where it asks."""

from __future__ import annotations

import argparse

from quantwm.cli.common import emit, progress, progress_done, say
from quantwm.errors import UserError
from quantwm.worlds.registry import download_world, world_presence, world_spec, world_terms


def add_weights(parser: argparse.ArgumentParser) -> None:
    """The --weights argument; the command line heeds it before a command runs."""
    parser.add_argument(
        "--weights",
        dest="worlds_in",
        metavar="FOLDER",
        help="where downloaded worlds lie; ~/.cache/quantwm by default",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", required=True, help="a name that `worlds` lists")
    parser.add_argument(
        "--agree", action="store_true", help="you have read its licence and agree to it"
    )
    add_weights(parser)


def run(arguments: argparse.Namespace) -> int:
    """Fetch what is missing; what is here already stays."""
    name = arguments.world
    spec, terms = world_spec(name), world_terms(name)
    if not world_presence(name).present:
        if terms and not arguments.agree:
            raise UserError(f"{name}: {terms}; add --agree if you have read it and agree")
        say(f"{spec.title}: {spec.licence}")
        download_world(
            name, arguments.agree, lambda stage, share: progress(f"{stage}: {100 * share:.0f} %")
        )
        progress_done()
    found = world_presence(name)
    emit({"world": name, "present": found.present, "where": found.where,
          "weight_bytes": found.weight_bytes})  # fmt: skip
    return 0
