"""app.py from outside: bad flags, a port in use, and a server that gives nothing away."""

from __future__ import annotations

import ast
import importlib.util
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def entry() -> ModuleType:
    """app.py as a module; the package app/ has the same name."""
    spec = importlib.util.spec_from_file_location("app_entry", ROOT / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nonsense"], "unrecognized"),
        (["--seed", "x"], "--seed"),
        (["--seed", "-1"], "--seed"),
        (["--steps", "0"], "--steps"),
        (["--port", "99999999"], "--port"),
        (["--world", "atlantis"], "unknown world"),
        (["--offload", "all"], "offload is one of"),
        (["--tile", "7"], "16 to 1024"),
        (["--lanes", "bf16,zip"], "unknown lane"),
        (["--scene", "moon"], "unknown scene"),
        (["--device", "tpu"], "unknown device"),
        (["--weights", __file__], "test_app_entry.py is a file"),
        (["--weights", ""], "got nothing"),
        (["--weights", "~nobody-of-this-name/x"], "cannot be looked into"),
        (["--weights", "x" * 300], "File name too long"),
    ],
)
def test_bad_flags_get_one_line_and_status_2(entry, capsys, flags: list[str], says: str) -> None:
    try:
        code = entry.main(["--port", str(free_port()), *flags])
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_port_in_use_gets_one_line_and_status_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, ROOT / "app.py"],
            capture_output=True,
            text=True,
            timeout=500,
            env={**os.environ, "GRADIO_SERVER_PORT": port},
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 2
    assert port in done.stderr and "in use" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_entry_is_short_and_switches_analytics_off_first() -> None:
    text = (ROOT / "app.py").read_text()
    assert len(text.splitlines()) < 80
    assert text.index("GRADIO_ANALYTICS_ENABLED") < text.index("app.ui")


def test_the_page_fetches_nothing_from_elsewhere() -> None:
    for file in (p for p in (ROOT / "app" / "web").rglob("*") if p.is_file()):
        text = file.read_text()
        assert "http://" not in text and "https://" not in text, file.name
        assert "@import" not in text and "url(" not in text, file.name


def test_the_template_holds_nothing_that_gradio_would_fill_in() -> None:
    text = (ROOT / "app" / "web" / "stage.html").read_text()
    assert "${" not in text and "{{" not in text and "`" not in text


def test_handlers_are_free_of_gradio() -> None:
    for name in ("handlers", "runner", "sessions", "controls", "wire", "files", "limits"):
        tree = ast.parse((ROOT / "app" / f"{name}.py").read_text())
        imported = {
            node.module if isinstance(node, ast.ImportFrom) else alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not any(str(module).startswith("gradio") for module in imported), name


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("gradio", reason="pip install gradio")
    from fake_engine import FakeBackend

    from app.ui import build

    reached.clear()
    connect = socket.socket.connect

    def noted(self: socket.socket, where: object) -> None:
        reached.append(str(where[0] if isinstance(where, tuple) else where))
        connect(self, where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", noted)
        demo, options = build(FakeBackend(tmp_path_factory.mktemp("scenes")))
        _, url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, **options)
        yield url
        demo.close()


reached: list[str] = []
"""Hosts that this process connected to while the page was served."""


def test_the_server_calls_nobody(address: str) -> None:
    assert status(address) == 200
    assert reached, "the requests of this test itself are seen"
    assert set(reached) <= {"127.0.0.1", "localhost"}


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_files_of_the_server_are_not_served(address: str) -> None:
    wrong = [
        f"{address}gradio_api/file={ROOT / 'app.py'}",
        f"{address}gradio_api/file={ROOT / 'assets'}",
        f"{address}gradio_api/file=/etc/passwd",
        f"{address}gradio_api/file=app.py",
        f"{address}session/unknown.zip",
        f"{address}session/..%2F..%2Fetc%2Fpasswd.zip",
    ]
    for url in wrong:
        assert status(url) in (400, 403, 404), url
    assert status(address) == 200


def test_no_endpoint_is_offered_to_programs(address: str) -> None:
    import json

    with urllib.request.urlopen(f"{address}gradio_api/info", timeout=60) as answer:
        info = json.load(answer)
    assert info["named_endpoints"] == {}
    assert info["unnamed_endpoints"] == {}


def test_a_large_upload_is_refused(address: str) -> None:
    import httpx

    from app import limits

    body = b"x" * (limits.MAX_UPLOAD_BYTES + 1000)
    answer = httpx.post(f"{address}gradio_api/upload", files={"files": ("a.png", body)}, timeout=60)
    assert answer.status_code in (400, 413)
