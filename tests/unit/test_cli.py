"""What the command line makes of the ends that every verb may come to."""

import signal
import sys
from types import SimpleNamespace

import pytest

from headrace import cli
from headrace.cli import main
from headrace.interrupts import Stopped
from headrace.plan import predict


def test_a_signal_while_torch_is_imported_says_a_line(capsys, monkeypatch):
    """Half a module must not be imported once more to see whether ranks have met."""

    def stopped(*_arguments):
        monkeypatch.delitem(sys.modules, "headrace.parallel.ranks", raising=False)
        half = SimpleNamespace(is_available=lambda: True)
        monkeypatch.setitem(sys.modules, "torch.distributed", half)
        monkeypatch.setitem(sys.modules, "torch", None)  # its import would raise
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(cli, "_call", stopped)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 143
    assert capsys.readouterr().err == "headrace doctor: stopped by SIGTERM\n"


def test_ctrl_c_in_a_verb_says_a_line(capsys, monkeypatch):
    def interrupted(*_arguments, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "predict", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "Qwen/Qwen3-8B"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "headrace plan: interrupted\n"
