"""Entry point: parse flags, build the page on a world, serve it on this machine only."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from typing import NoReturn

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before Gradio is imported: it reads this once
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched and nothing is sent


class Parser(argparse.ArgumentParser):
    """Argument mistakes get one line, like every other mistake."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"app.py: {message} (--help lists the flags)\n")


def read_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="app.py", description=__doc__)
    parser.add_argument("--world", default="embedded")
    parser.add_argument("--lanes", default="bf16,qvg,quantwm", help="caches, separated by commas")
    parser.add_argument("--scene", help="start scene; the world's first one by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="denoising steps; the world's own by default")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
    parser.add_argument("--port", default=os.environ.get("GRADIO_SERVER_PORT", "7860"))
    parser.add_argument("--share", action="store_true", help="open Gradio's public tunnel too")
    return parser.parse_args(arguments)


def check_port(host: str, text: str) -> int:
    """The port as a number, if it is free."""
    from app.limits import MAX_PORT
    from quantwm.errors import UserError

    port = int(text) if text.isascii() and text.isdigit() else 0
    if not 1 <= port <= MAX_PORT:
        raise UserError(f"--port must be a whole number from 1 to {MAX_PORT}, got {text[:20]!r}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"cannot serve on {host}:{port} ({reason}); choose another --port"
        ) from None
    return port


def main(arguments: list[str] | None = None) -> int:
    from quantwm.errors import UserError

    flags = read_flags(arguments)
    try:
        port = check_port(flags.host, flags.port)
        from app.library import make_backend
        from app.ui import build

        demo, options = build(make_backend(flags))
    except UserError as error:
        print(f"app.py: {error}", file=sys.stderr)
        return 2
    where = {"server_name": flags.host, "server_port": port, "share": flags.share}
    demo.launch(**where, prevent_thread_lock=True, **options)
    print(f"http://{flags.host}:{port}", flush=True)
    demo.block_thread()
    return 0


if __name__ == "__main__":
    sys.exit(main())
