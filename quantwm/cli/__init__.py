"""The command line: one file per command; this one picks it and turns mistakes into one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from quantwm.cli.common import Parser
from quantwm.errors import UserError

COMMANDS = {
    "play": "run a session headless and write it to a folder",
    "replay": "run a recorded session again and say whether it is bit-identical",
    "compare": "fidelity and flicker between two recordings or video files",
    "study": "recorded q/k/v tensors through each cache, causally, chunk by chunk",
    "report": "the paper's evidence on a world, the embedded one by default, as an HTML report",
    "demo": "record the three short sessions of assets/demo again",
    "plan": "bytes by part, ratios and peak, before anything is allocated",
    "evaluate-world": "the embedded world's acceptance table, or its statistics, beside the truth",
    "check-golden": "every model family against golden tensors, within their tolerances",
    "download": "fetch a published world's files, its licence agreed to where it asks",
    "worlds": "worlds, their licence, the memory they need and what is present",
}
"""Name and help of each command; quantwm/cli/<name>.py (- as _) has add_arguments and run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 2 and one line on standard error for a mistake."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        print(f"quantwm: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        from quantwm.cache.remedy import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        print(f"quantwm: out of memory; use less input or free memory ({reason})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quantwm: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output has gone; there is nobody left to tell
        sys.stdout = None  # type: ignore[assignment]
        return 141


def _run(arguments: list[str]) -> int:
    parser = Parser(
        prog="quantwm", description="See, measure and shrink KV caches of world models."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    # only the command that was asked for is imported: `worlds` must not wait for torch's compilers
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == wanted:
            module = importlib.import_module(f"quantwm.cli.{name.replace('-', '_')}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    if wanted is not None and wanted not in COMMANDS:
        _unknown(wanted)
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        raise UserError(f"name a command: {', '.join(COMMANDS)}; --help explains them")
    if getattr(parsed, "worlds_in", None) is not None:
        from quantwm.worlds.registry import keep_weights_in

        keep_weights_in(parsed.worlds_in)
    return parsed.run(parsed)


def _unknown(name: str) -> NoReturn:
    raise UserError(f"unknown command {name!r}; there are {', '.join(COMMANDS)}")
