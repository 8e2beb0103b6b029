"""A pass over a source: checked, kept whole; one that is stopped continues from its last commit."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.half_made import BYTES, data_of, files, rows, stop_after
from tests.support.row_files import rows_data, write_parquet
from tests.support.texts import text_corpus, warnings, write_files
from torchtitan_cp.config.data import Data
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.tokenization import fit_conversation
from torchtitan_cp.data.errors import DataError


def test_a_pass_that_is_stopped_anywhere_gives_the_same_files(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = rows(tmp_path / "corpus")
    prepare(data_of(corpus, tmp_path / "straight", "jsonl"), BYTES)
    for last in range(60, 280, 23):
        data = data_of(corpus, tmp_path / str(last), "jsonl")
        stop_after(monkeypatch, data, last)
        stop_after(monkeypatch, data, 1)
        prepare(data, BYTES)
        assert files(tmp_path / str(last)) == files(tmp_path / "straight")


def lose(path: Path) -> str:
    path.unlink()
    return f"{path.name} is missing"


def shorten(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size - 1)
    return f"{path.name} has {size - 1} bytes instead of "


@pytest.mark.parametrize(
    ("name", "damage"),
    [("train-00000.bin", lose), ("groups.jsonl", lose), ("train.groups.bin", lose), ("train-00000.bin", shorten)],
)
def test_half_made_tokens_that_are_damaged_are_named_and_made_again(
    tmp_path: Path,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], str],
) -> None:
    corpus = rows(tmp_path / "corpus")
    prepare(data_of(corpus, tmp_path / "straight", "jsonl"), BYTES)
    data = data_of(corpus, tmp_path / "cache", "jsonl")
    left = stop_after(monkeypatch, data, 200)
    caplog.clear()
    what = damage(left / name)
    prepare(data, BYTES)
    [line] = [line for line in warnings(caplog) if "damaged" in line]
    assert line.startswith(f"the partial tokens in {left} are damaged ({what}")
    assert line.endswith("; they are made again")
    assert files(tmp_path / "cache") == files(tmp_path / "straight")


def test_half_made_tokens_of_another_version_are_made_again(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = rows(tmp_path / "corpus")
    prepare(data_of(corpus, tmp_path / "straight", "jsonl"), BYTES)
    data = data_of(corpus, tmp_path / "cache", "jsonl")
    journal = stop_after(monkeypatch, data, 200) / "journal.json"
    journal.write_text(journal.read_text().replace('"state"', '"progress"'))
    prepare(data, BYTES)
    assert files(tmp_path / "cache") == files(tmp_path / "straight")


def test_half_made_tokens_of_a_corpus_that_changed_are_cleared_away_and_others_kept(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = data_of(rows(tmp_path / "corpus"), tmp_path / "cache", "jsonl")
    other = data_of(text_corpus(tmp_path / "other", files=80), tmp_path / "cache", "text")
    old = stop_after(monkeypatch, data, 200)
    kept = stop_after_beside(monkeypatch, other, 70, old)
    os.utime(tmp_path / "corpus" / "0.jsonl", ns=(0, 0))
    prepare(data, BYTES)
    assert not old.exists()
    assert kept.exists()


def stop_after_beside(monkeypatch: pytest.MonkeyPatch, data: Data, last: int, beside: Path) -> Path:
    hidden = beside.rename(beside.parent.parent / "hidden")
    left = stop_after(monkeypatch, data, last)
    hidden.rename(beside)
    return left


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_token_ids_is_kept_as_it_is(tmp_path: Path, kind: str) -> None:
    ids = [[5, 6, 7], [8, 256], [], [256], list(range(200))]
    if kind == "parquet":
        write_parquet(tmp_path / "corpus" / "a.parquet", {"ids": pa.array(ids, pa.list_(pa.uint16()))})
    else:
        write_files(tmp_path / "corpus", {"a.jsonl": "\n".join(json.dumps({"ids": row}) for row in ids)})
    data = rows_data(kind, tmp_path / "corpus", token_field="ids", cache_folder=str(tmp_path / "cache"))
    store = prepare(data, BYTES).sources["corpus"].train
    stored = [store.read(index, 0, length).tolist() for index, length in enumerate(store.document_lengths)]
    assert stored == [[5, 6, 7, 256], [8, 256], [256], [*range(200), 256]]


def test_token_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "corpus", {"a.jsonl": '{"ids": [1, 2]}\n{"ids": [3, 257]}'})
    data = rows_data("jsonl", tmp_path / "corpus", token_field="ids", cache_folder=str(tmp_path / "cache"))
    with pytest.raises(DataError) as caught:
        prepare(data, BYTES)
    assert "a.jsonl:2 holds the token id 257, but the tokenizer has 257 pieces" in str(caught.value)
    assert "fix: set tokenizer.kind and tokenizer.path to the tokenizer that made the ids" in str(caught.value)


masks = st.lists(st.booleans(), min_size=1, max_size=60).map(lambda bits: np.array(bits, dtype=bool))


@given(masks, st.integers(1, 70), st.sampled_from(["drop", "truncate_left", "truncate_right", "split"]))
def test_what_is_kept_of_a_conversation_fits_and_is_cut_only_where_it_must(
    mask: np.ndarray, most: int, too_long: str
) -> None:
    spans = fit_conversation(mask, most, too_long)
    assert all(0 <= start < stop <= len(mask) and stop - start <= most for start, stop in spans)
    assert fit_conversation(mask, 0, too_long) == [(0, len(mask))]
    if len(mask) <= most:
        assert spans == [(0, len(mask))]
    elif too_long == "split":
        assert [token for span in spans for token in range(*span)] == list(range(len(mask)))
        for start, stop in spans[:-1]:
            ends = [edge for edge in range(start + 1, start + most + 1) if mask[edge - 1] and not mask[edge : edge + 1]]
            assert stop == (ends[-1] if ends else start + most)
    else:
        kept = {"drop": [], "truncate_left": [(len(mask) - most, len(mask))], "truncate_right": [(0, most)]}
        assert spans == kept[too_long]
