"""Fetches a Wan world's files from the Hugging Face hub, with progress in bytes."""

from __future__ import annotations

import fnmatch
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quantwm.errors import UserError
from quantwm.worlds.wan import files
from quantwm.worlds.wan.catalog import Entry, Part

Progress = Callable[[str, float], None]
LOOK_SECONDS = 0.5  # between two looks at how much has arrived


def download(entry: Entry, agreed: bool, progress: Progress | None = None) -> None:
    """Fetch the parts that are missing or incomplete.

    agreed: a person has seen entry.agree and said yes; not asked for where the licence is free.
    Raises UserError without agreement, without huggingface_hub, and when a repository cannot be
    had; what arrived stays and the next call goes on from there.
    """
    if entry.agree and agreed is not True:
        raise UserError(
            f"{entry.name} is downloaded only after its licence is agreed to: {entry.agree}"
        )
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(
            "downloading needs the package huggingface_hub: pip install huggingface_hub"
        ) from None
    report = progress or (lambda stage, share: None)
    for name, part in entry.parts.items():
        if files.part_problem(name, part) is not None:
            _fetch(huggingface_hub, name, part, report)
    report("Downloaded", 1.0)
    files.require(entry)


def _fetch(hub: object, name: str, part: Part, report: Progress) -> None:
    stage = f"Downloading the {name} from {part.repo}"
    folder = files.repo_folder(part)
    patterns = [part.path, f"{part.path}/*"]
    report(stage, 0.0)
    try:
        expected = _expected_bytes(hub, part, patterns)
        _require_space(folder, expected)
        with _watched(folder, expected, lambda share: report(stage, share)):
            hub.snapshot_download(part.repo, allow_patterns=patterns, local_dir=folder)
    except UserError:
        raise
    except _failures() as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"the {name} could not be downloaded from {part.repo} ({reason[:160]})"
        ) from None


def _failures() -> tuple[type[Exception], ...]:
    """What a transfer may fail with; each version of the hub's client speaks HTTP through another
    library, whose errors have no common base (httpx, httpx2; those of requests are OSErrors)."""
    from huggingface_hub.errors import HfHubHTTPError

    clients = (sys.modules.get(name) for name in ("httpx", "httpx2"))
    http = [client.HTTPError for client in clients if client is not None]
    # The hub's own transfer, written in Rust, raises RuntimeError.
    return HfHubHTTPError, OSError, ValueError, RuntimeError, *http


def _expected_bytes(hub: object, part: Part, patterns: list[str]) -> int:
    """What the hub says the files weigh; 0 when it does not say."""
    siblings = hub.HfApi().model_info(part.repo, files_metadata=True).siblings or []
    return sum(
        file.size or 0
        for file in siblings
        if any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in patterns)
    )


def _require_space(folder: Path, expected: int) -> None:
    """UserError where the disk cannot take what the folder lacks of `expected` bytes."""
    missing = expected - _bytes_in(folder)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if missing > free:
        raise UserError(
            f"the download needs {missing / 2**30:.1f} GiB, the disk of {there} has "
            f"{free / 2**30:.1f} GiB free: make room, or choose another disk's folder (--weights)"
        )


@contextmanager
def _watched(folder: Path, expected: int, report: Callable[[float], None]) -> Iterator[None]:
    """Report the share of `expected` that has arrived in the folder meanwhile.

    Bytes on the disk, half-written files counted: what every kind of transfer has in common.
    """
    done = threading.Event()
    before = _bytes_in(folder)

    def look() -> None:
        while not done.wait(LOOK_SECONDS):
            report(min((_bytes_in(folder) - before) / expected, 1.0))

    watcher = threading.Thread(target=look, name="download-progress", daemon=True)
    if expected:
        watcher.start()
    try:
        yield
    finally:
        done.set()
        if expected:
            watcher.join()


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # a half-written file was renamed between the two calls
    return total
