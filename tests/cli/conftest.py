"""`fedopt` in the process of the tests, where importing torch anew is not what is tested."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
from processes import Ended, InProcess

from fedopt_flwr.cli import main
from fedopt_flwr.errors import FedoptWarning


@pytest.fixture
def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> InProcess:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["fedopt", *arguments])
        with warnings.catch_warnings():
            warnings.simplefilter("default", FedoptWarning)
            with pytest.raises(SystemExit) as ended:
                main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return run
