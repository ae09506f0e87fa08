"""What the command line makes of the ends that every verb may come to."""

import pytest

from headrace.cli import main
from headrace.plan import predict


def test_ctrl_c_in_a_verb_says_a_line(capsys, monkeypatch):
    def interrupted(*_arguments, **_more):
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "predict", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "Qwen/Qwen3-8B"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "headrace plan: interrupted\n"
