"""The list of commands, and their help."""

import pytest

from torchtitan_cp.__main__ import COMMANDS, main


def test_every_command_says_what_it_takes_and_another_is_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        assert "usage: " in capsys.readouterr().out
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert main(["trian"]) == 2
    assert "there is no command 'trian'" in capsys.readouterr().err
