"""`check-golden`: every model family against golden tensors, within their own tolerances."""

from __future__ import annotations

import argparse
from pathlib import Path

from quantwm.cli.common import emit, names, say
from quantwm.errors import UserError
from quantwm.goldens import FamilyResult, check_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `check-golden`."""
    parser.add_argument("folder", nargs="?", metavar="DIR", help="folder of golden files")
    parser.add_argument(
        "--families", nargs="+", metavar="A,B", help="only these, with commas or blanks; or all"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check and print; exit status 1 when a family is not ok."""
    folder, given = arguments.folder, arguments.families
    if folder is None and given is not None and len(given) > 1:
        folder, given = given[-1], given[:-1]  # "--families A B DIR"
    if folder is None:
        raise UserError("give the folder that holds the golden files")
    families = None if given is None else [name for text in given for name in names(text)]
    document = check_folder(Path(folder), families, _report)
    emit(document)
    return 0 if document["ok"] else 1


def _report(result: FamilyResult) -> None:
    word = "ok" if result.ok else "NOT OK"
    say(
        f"{result.family}: {word}, max abs {result.max_abs:.3g}, "
        f"relative rms {result.max_rel:.3g}, {result.worst}"
    )
    for place, worst in result.by_chunk().items():
        say(f"  {place:44s} {worst:.3g}")
