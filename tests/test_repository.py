"""What the repository promises about itself: its size, and that no file is too large to host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHOLE, WEIGHTS, SHARD = 52_000_000, 44_000_000, 16_000_000


def tracked() -> list[Path]:
    """Files that git tracks and that exist; the tests are skipped outside a clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True, text=True
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_repository_and_its_weights_stay_small() -> None:
    sizes = {path: path.stat().st_size for path in tracked()}
    weights = [size for path, size in sizes.items() if path.parent == ROOT / "assets/embedded"]
    assert sum(sizes.values()) <= WHOLE
    assert sum(weights) <= WEIGHTS
    assert max(sizes.values()) <= SHARD
