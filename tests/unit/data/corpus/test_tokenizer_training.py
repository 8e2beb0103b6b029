"""Training a tokenizer on a corpus: a lossless model, the same each time, or what could be done instead."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece

from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.tokenizer import load_tokenizer
from torchtitan_cp.data.corpus.tokenizer_training import LINE_CHARACTERS, sample_lines, train_sentencepiece
from torchtitan_cp.data.errors import DataError

SAMPLE = [Path(sentencepiece.__file__).read_text(), Path(__file__).read_text()]


def test_training_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.model", "again.model"):
        train_sentencepiece(iter(SAMPLE), 600, tmp_path / name)
    assert (tmp_path / "again.model").read_bytes() == (tmp_path / "one.model").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.model", "one.model"]


def test_training_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_sentencepiece(iter(SAMPLE), 500, tmp_path / "quiet.model")
    assert capfd.readouterr() == ("", "")


def test_training_learns_indentation_and_from_lines_of_any_length(tmp_path: Path) -> None:
    train_sentencepiece([*SAMPLE, "wordy" * 100_000], 600, tmp_path / "m")
    tokenizer = load_tokenizer(TokenizerConfig(path=str(tmp_path / "m")))
    indented, word = tokenizer.encode_batch(["\n        return", "wordy" * 8])
    assert len(indented) <= 3
    assert len(word) < 16


def test_lines_are_thinned_evenly_to_the_limit() -> None:
    def numbered() -> Iterator[str]:
        yield from (f"{index:09d}\n\n  \n" for index in range(1000))

    assert len(sample_lines(numbered(), 9000)) == 1000
    kept = [int(line) for line in sample_lines(numbered(), 2000)]
    assert kept == list(range(0, 1000, 8))
    assert [len(line) for line in sample_lines(["x" * (LINE_CHARACTERS + 5)], 10**6)] == [LINE_CHARACTERS, 5]


@pytest.mark.parametrize(
    ("text", "vocab_size", "wanted", "fix"),
    [
        ("hello world", 4096, "the corpus is too small for a tokenizer of", "fix: give more text, or set"),
        (
            " ".join(f"word{number}" for number in range(400)),
            4096,
            "the corpus is too small for a tokenizer of",
            "fix: set tokenizer.vocab_size to at most ",
        ),
        (
            "".join(map(chr, range(0x4E00, 0x4F00))),
            300,
            "is less than the number of characters",
            "fix: set tokenizer.vocab_size to ",
        ),
        (" \n\t\n", 300, "the corpus holds only whitespace", "fix: check data.path"),
    ],
)
def test_training_that_cannot_be_says_what_could(
    tmp_path: Path, text: str, vocab_size: int, wanted: str, fix: str
) -> None:
    with pytest.raises(DataError) as caught:
        train_sentencepiece([text], vocab_size, tmp_path / "m")
    assert wanted in str(caught.value)
    assert fix in str(caught.value)
    assert not list(tmp_path.iterdir())
    advised = re.search(r"vocab_size to (?:at most )?(\d+)", str(caught.value))
    if advised:
        train_sentencepiece([text], int(advised[1]), tmp_path / "m")
