"""A small run under the adversary of tests/chaos.py, which is run in full by hand."""

from __future__ import annotations

import pytest
from chaos import Chaos
from processes import Processes


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "gone_from"), [("scaffold_m", None), ("padamfed", 4)])
def test_a_federation_under_attack_does_every_round_once(
    processes: Processes, rule: str, gone_from: int | None
) -> None:
    chaos = Chaos(processes, rule, 5, 4, 16, gone_from, server_kills=0.1, start_timeout=60)
    chaos.run()
    assert sum(chaos.counts.values()) > 2
