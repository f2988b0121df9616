"""What was installed when a run began: its folder says it, as no other file of it depends on it."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path

VERSIONS = "versions.json"
_PACKAGES = ("fedopt-flwr", "flwr", "torch", "numpy")


def versions() -> dict[str, str]:
    """Return the versions here, of Python and of what computes a run."""
    found = {"Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def read_versions(folder: Path) -> dict[str, str]:
    """Return those of a run; nothing where its folder does not tell them."""
    try:
        found = json.loads((folder / VERSIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
