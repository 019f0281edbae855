"""Where the Wan worlds' files lie on this machine, what is missing, and their hash."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from quantwm.errors import UserError
from quantwm.worlds.registry import Presence
from quantwm.worlds.wan.catalog import Entry, Part
from quantwm.worlds.wan.checkpoint import weight_files

HASHES = "sha256.json"
_root = Path.home() / ".cache" / "quantwm"


def set_root(folder: Path | str) -> None:
    """Use another folder for downloaded weights. UserError where it is something else."""
    global _root
    if not str(folder):
        raise UserError("--weights is a folder of downloaded worlds, got nothing")
    try:
        chosen = Path(folder).expanduser().absolute()
        there = chosen.exists()
    except (OSError, RuntimeError) as error:  # no right to look; ~ of an unknown person
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--weights {folder} cannot be looked into: {reason}") from error
    if there and not chosen.is_dir():
        raise UserError(f"--weights is a folder of downloaded worlds, {chosen} is a file")
    if there and not os.access(chosen, os.R_OK | os.X_OK):
        raise UserError(f"--weights {chosen} cannot be looked into: it may not be read")
    _root = chosen


def root() -> Path:
    return _root


def part_path(part: Part) -> Path:
    """Where a part's file or folder is, downloaded or not; worlds share repositories."""
    return repo_folder(part) / part.path


def repo_folder(part: Part) -> Path:
    """Where the files of a part's repository lie, under the repository's own paths."""
    return _root / part.repo.replace("/", "--")


def part_problem(name: str, part: Part) -> str | None:
    """One line when a part is missing or half downloaded, else None."""
    path = part_path(part)
    if not path.exists():
        return f"the {name} is missing: {part.repo}, {part.path}"
    if name == "tokenizer":
        found = (path / "tokenizer.json").is_file()
        return None if found else f"the {name} is half downloaded: {path} lacks tokenizer.json"
    try:
        weight_files(path)
    except UserError as error:
        return f"the {name}: {error}"
    return None


def presence(entry: Entry) -> Presence:
    """Whether every part is there; problem names the first one that is not."""
    problems = [part_problem(name, part) for name, part in entry.parts.items()]
    total = sum(
        file.stat().st_size
        for (name, part), problem in zip(entry.parts.items(), problems, strict=True)
        if problem is None and name != "tokenizer"
        for file in weight_files(part_path(part))
    )
    problem = next((line for line in problems if line is not None), None)
    return Presence(problem is None, str(_root), total, problem)


def require(entry: Entry) -> None:
    """UserError unless everything is there."""
    found = presence(entry)
    if found.problem is not None:
        title = entry.title.partition(":")[0]
        raise UserError(
            f"{title} cannot be loaded: {found.problem}; download it first (on the page, or "
            f"python -m quantwm download --world {entry.name}; into {_root})"
        )


def weights_sha256(entry: Entry) -> str:
    """One hash over the transformer's and the autoencoder's files.

    A file's own hash is kept beside the downloads until the file changes: 37 GB take half a
    minute, and every recording asks.
    """
    known = _read_hashes()
    digest = hashlib.sha256()
    for name in ("transformer", "vae"):
        for file in sorted(weight_files(part_path(entry.parts[name]))):
            digest.update(file.name.encode())
            digest.update(bytes.fromhex(_file_sha256(file, known)))
    return digest.hexdigest()


def _file_sha256(file: Path, known: dict[str, str]) -> str:
    state = file.stat()
    key = f"{file} {state.st_size} {state.st_mtime_ns}"
    if key not in known:
        with file.open("rb") as stream:
            known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        try:
            (_root / HASHES).write_text(json.dumps(known))
        except OSError:
            return known[key]  # a folder that cannot be written: hashed again next time
    return known[key]


def _read_hashes() -> dict[str, str]:
    try:
        found = json.loads((_root / HASHES).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    good = {k: v for k, v in found.items() if isinstance(v, str) and len(v) == 64}
    return {k: v for k, v in good.items() if set(v) <= set("0123456789abcdef")}
