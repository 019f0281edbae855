"""Where the Wan worlds' files lie on this machine, what is missing, and how to fetch it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from quantwm.errors import UserError
from quantwm.worlds.registry import Presence
from quantwm.worlds.wan.catalog import Entry, Part
from quantwm.worlds.wan.checkpoint import weight_files

Progress = Callable[[str, float], None]
_root = Path.home() / ".cache" / "quantwm"


def set_root(folder: Path | str) -> None:
    """Use another folder for downloaded weights."""
    global _root
    _root = Path(folder).expanduser()


def root() -> Path:
    return _root


def part_path(part: Part) -> Path:
    """Where a part's file or folder is, downloaded or not; worlds share repositories."""
    return _root / part.repo.replace("/", "--") / part.path


def presence(entry: Entry) -> Presence:
    """Whether every part is there; problem names the first one that is not."""
    total = 0
    problem = None
    for name, part in entry.parts.items():
        path = part_path(part)
        if not path.exists():
            problem = problem or f"the {name} is missing: {part.repo}, {part.path}"
            continue
        try:
            files = list(path.iterdir()) if name == "tokenizer" else weight_files(path)
        except UserError as error:
            problem = problem or f"the {name}: {error}"
            continue
        if name != "tokenizer":
            total += sum(file.stat().st_size for file in files)
    return Presence(problem is None, str(_root), total, problem)


def require(entry: Entry) -> None:
    """UserError unless everything is there."""
    found = presence(entry)
    if found.problem is not None:
        raise UserError(
            f"{entry.name} cannot be loaded: {found.problem}; download it first (into {_root})"
        )


def download(entry: Entry, agreed: bool, progress: Progress | None = None) -> None:
    """Fetch what is missing with huggingface_hub.

    agreed: a person has seen entry.agree and said yes; not asked for where the licence is free.
    """
    if entry.agree and not agreed:
        raise UserError(f"{entry.name} is downloaded only after its licence is agreed to: "
                        f"{entry.agree}")  # fmt: skip
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise UserError(
            "downloading needs the package huggingface_hub: pip install huggingface_hub"
        ) from None
    missing = [(n, p) for n, p in entry.parts.items() if not part_path(p).exists()]
    for index, (name, part) in enumerate(missing):
        if progress is not None:
            progress(f"Downloading the {name} from {part.repo}", index / len(missing))
        try:
            snapshot_download(
                part.repo,
                allow_patterns=[part.path, f"{part.path}/*"],
                local_dir=_root / part.repo.replace("/", "--"),
            )
        except (HfHubHTTPError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{part.repo} could not be downloaded ({reason[:160]})") from None
    if progress is not None:
        progress("Downloaded", 1.0)
    require(entry)


def weights_sha256(entry: Entry) -> str:
    """One hash over the transformer's and the autoencoder's files."""
    digest = hashlib.sha256()
    for name in ("transformer", "vae"):
        path = part_path(entry.parts[name])
        for file in sorted(weight_files(path)):
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
