"""`python -m fedopt_flwr` is the `fedopt` command."""

from __future__ import annotations

from .cli import main

main()
