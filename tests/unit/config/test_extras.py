"""Optional packages: what is said of one that is missing, is too old or is broken, and how to mend it."""

import importlib
import shlex
import sys
from importlib import metadata
from pathlib import Path

import pytest

from torchtitan_cp.config import ConfigError, extras
from torchtitan_cp.config.extras import import_extra

INSTALL = f"\n  fix: {shlex.quote(sys.executable)} -m pip install 'torchtitan-cp[hub]'"
HUB = ["tokenizers>=0.20; extra == 'hub'", "transformers>=5.23,<5.25; python_version >= '3.8' and extra == 'hub'"]


@pytest.fixture(autouse=True)
def requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: HUB)


def refusal(package: str = "tokenizers", *, pinned: bool = False) -> str:
    with pytest.raises(ConfigError) as caught:
        import_extra(package, extra="hub", needed_by="a.key = 'x'", pinned=pinned)
    return str(caught.value)


def test_a_missing_package_is_to_be_installed_where_this_process_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refusal() == f"a.key = 'x' needs the package `tokenizers`, which is not installed{INSTALL}"


def test_a_package_that_is_there_and_broken_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package.py").write_text("import none_of_these_packages")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = refusal("broken_package")
    assert "`broken_package`, which cannot be imported: No module named 'none_of_these_packages'" in message


def test_only_a_pinned_package_must_not_be_older_than_the_extra_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "4.57.1")
    monkeypatch.setattr(importlib, "import_module", lambda name: sys)
    assert import_extra("transformers", extra="hub", needed_by="") is sys
    wanted = f"a.key = 'x' needs the package `transformers` <5.25,>=5.23, and 4.57.1 is installed{INSTALL}"
    assert refusal("transformers", pinned=True) == wanted


@pytest.mark.parametrize(("version", "warnings"), [("5.24.0", 0), ("5.25.0", 1)])
def test_a_version_that_is_later_than_the_extra_allows_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, warnings: int
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.setattr(importlib, "import_module", lambda name: sys)
    extras._warn_of_later.cache_clear()
    for _ in range(2):
        assert import_extra("transformers", extra="hub", needed_by="", pinned=True) is sys
    wanted = "transformers 5.25.0 is later than the versions that were tested (<5.25,>=5.23)"
    assert caplog.messages == [wanted] * warnings


def test_a_package_that_exists_for_a_newer_python_alone_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["tokenizers; python_version >= '3.98' and extra == 'hub'"])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = refusal()
    assert "fix: the extra `hub` has it for a newer Python than this 3." in message
    assert "VENV=ENV ./run_train.sh" in message
