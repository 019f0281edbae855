"""Entry point: parse flags, build the page on a world, serve it on this machine only."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import NoReturn

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before Gradio is imported: it reads this once
# The hub is asked for a world that a person chose to download, and for nothing else.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


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
    parser.add_argument("--offload", default="auto", help="auto, none, vae or blocks on the CPU")
    parser.add_argument(
        "--tile", type=int, default=0, help="latent cells a side decoded at once, 0: all"
    )
    parser.add_argument(
        "--demo", action="store_true", help="open the recorded sessions: no GPU, no weights"
    )
    parser.add_argument("--weights", help="folder of downloaded worlds, ~/.cache/quantwm")
    parser.add_argument("--downloads", action="store_true", help="visitors may fetch worlds")
    parser.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
    parser.add_argument("--port", default=os.environ.get("GRADIO_SERVER_PORT", "7860"))
    parser.add_argument("--share", action="store_true", help="open Gradio's public tunnel too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    flags = read_flags(arguments)
    from app.zero import is_zero_gpu, load_spaces

    spaces = load_spaces()  # before anything that may touch CUDA
    from app.address import check_port
    from app.inspector.demo import demo_page
    from quantwm.errors import UserError

    try:
        port = check_port(flags.host, flags.port)
        page = demo_page() if flags.demo else ""
        from app.library import make_backend

        backend = make_backend(flags)  # mistakes are found before Gradio is loaded
        from app.ui import build

        if is_zero_gpu(spaces):  # weights are packed in the parent; a lent process is short-lived
            backend.load(flags.world, lambda stage, share: None)
        demo, options = build(backend, spaces)
    except UserError as error:
        print(f"app.py: {error}", file=sys.stderr)
        return 2
    options |= {"server_name": flags.host, "server_port": port, "share": flags.share}
    demo.launch(prevent_thread_lock=True, **options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that session folders are deleted
    print(f"http://{flags.host}:{port}{page}", flush=True)
    demo.block_thread()
    return 0


if __name__ == "__main__":
    sys.exit(main())
