"""`torchtitan-cp prepare`: what it makes, what a check and a run then say, and how it is stopped."""

import logging
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.hub_models import write_start
from tests.support.runs import write_run
from torchtitan_cp.__main__ import main
from torchtitan_cp.checkpoint.hub import WEIGHT_FILES
from torchtitan_cp.config import load_config
from torchtitan_cp.data.corpus import cache
from torchtitan_cp.data.corpus.cache import UnpreparedText, prepare
from torchtitan_cp.data.corpus.tokenization import Tokenization


def test_a_check_says_what_is_to_tokenize_until_it_is_prepared_and_a_run_what_that_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = str(write_run(tmp_path))
    override = "--data.min_document=3"
    assert main(["check", path, override]) == 0
    assert not (tmp_path / "cache").exists()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("to tokenize before the first step: corpus: 12 files, ")
    assert line.endswith(f"without holding GPUs: torchtitan-cp prepare {path} {override}")
    assert main(["prepare", path, "--workers", "1", override]) == 0
    assert f"prepared in {tmp_path}/cache: a run of this config begins at once" in capsys.readouterr().out
    assert main(["check", path, override]) == 0
    assert "to tokenize" not in capsys.readouterr().out
    assert main(["check", path]) == 0
    assert "to tokenize" in capsys.readouterr().out, "of other settings"
    caplog.clear()
    config = load_config(path, [override])
    assert prepare(config.data, config.tokenizer).sources
    [found] = [record.getMessage() for record in caplog.records]
    assert ", which took " in found
    assert found.endswith(" s to make")


def test_with_a_tokenizer_to_train_everything_is_to_tokenize(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_run(tmp_path))
    kinds = ["--tokenizer.kind=sentencepiece", "--tokenizer.vocab_size=500"]
    assert main(["check", path, *kinds]) == 0
    assert "to tokenize before the first step: corpus: 12 files" in capsys.readouterr().out
    assert main(["prepare", path, "--workers=1", *kinds]) == 0
    assert len(list((tmp_path / "cache").glob("tokenizer-*.model"))) == 1
    assert main(["check", path, *kinds]) == 0
    assert "to tokenize before" not in capsys.readouterr().out


def test_a_checkpoint_on_the_hub_is_downloaded_with_its_weights_before_the_tokens_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = str(write_start(tmp_path, "llama")), list[str]()

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        assert not (tmp_path / "cache").exists()
        return str(tmp_path / "hub")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=download))
    assert main(["prepare", path, "--workers=1", "--model.hub_checkpoint=someone/llama"]) == 0
    assert WEIGHT_FILES in asked
    assert list((tmp_path / "cache").glob("*/manifest.json"))


@pytest.mark.parametrize(
    ("size_bytes", "said"),
    [
        (0, "books, code: 3 files of unknown size"),
        (8_000, "books, code: 3 files, 8 KiB, very roughly 2,000 tokens, under a second on 2 cores"),
        (3_300_000_000, "books, code: 3 files, 3.07 GiB, very roughly 800,000,000 tokens, 10 min on 2 cores"),
    ],
)
def test_text_to_tokenize_is_estimated_in_round_numbers(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, said: str
) -> None:
    monkeypatch.setattr(cache, "usable_cores", lambda: 2)
    assert str(UnpreparedText(("books", "code"), 3, size_bytes)) == said


def test_a_stop_says_what_is_kept_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, write = str(write_run(tmp_path)), Tokenization._write

    def write_and_be_stopped(self: Tokenization, *document: object) -> None:
        write(self, *document)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenization, "_write", write_and_be_stopped)
        assert main(["prepare", path, "--workers", "1"]) == 128 + signal.SIGTERM
    assert "stopped while tokenizing: " in capsys.readouterr().err
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    assert main(["prepare", path, "--workers", "1"]) == 0
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--data.path=nowhere", "data.source = 'text' finds no file at data.path = 'nowhere'"),
        ("--model.hub_checkpoint=nowhere", "model.hub_checkpoint: nowhere/config.json cannot be read"),
        ("--model.overrides.vocab_size=100", "the model has 100 embeddings and the tokenizer 257 pieces"),
        ("--workers=0", "argument --workers: 0 is less than 1"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    try:
        code = main(["prepare", str(write_run(tmp_path)), override])
    except SystemExit as ended:  # of argparse
        code = int(str(ended.code))
    assert code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
