"""Seeds for named purposes, so that no code needs a global generator.

Every random draw of a run has its own seed, made from the run's seed and what the draw is for:
`derive(seed, "batches", client_id, round)`. Order of execution therefore never matters.
"""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2**63) that depends on every part; 1 and "1" are different parts."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
