"""Whether the page can be served where it was asked to be."""

from __future__ import annotations

import socket

from app import limits
from quantwm.errors import UserError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a page that is served there."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def check_port(host: str, text: str) -> int:
    """The port as a number.

    Raises:
        UserError: not a port, or somebody listens there already.
    """
    port = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 1 <= port <= limits.MAX_PORT:
        raise UserError(
            f"--port must be a whole number from 1 to {limits.MAX_PORT}, got {text[:20]!r}"
        )
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
