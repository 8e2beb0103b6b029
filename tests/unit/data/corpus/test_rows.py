"""Sources of rows: Parquet and datasets, columns of text and of token ids, groups."""

import importlib
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.texts import read, texts, warnings, write_files
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.sections import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.documents import check_corpus
from torchtitan_cp.data.corpus.records import SkippedRecords
from torchtitan_cp.data.errors import DataError

LINES = [f"row {index} ä" for index in range(700)]
BYTES = TokenizerConfig(kind="bytes")


def rows_data(source: str, path: Path | str, **keys: Any) -> Data:
    return Data(source=source, path=str(path), **{"validation_fraction": 0.0, **keys})


def write_parquet(path: Path, columns: dict[str, Any], row_group_rows: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, row_group_size=row_group_rows)
    return path


def refuse(data: Data) -> str:
    with pytest.raises(DataError) as caught:
        read(data)
    return str(caught.value)


def test_parquet_gives_its_rows_in_order_over_row_groups_and_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"text": LINES[:400], "other": range(400)})
    write_parquet(tmp_path / "b" / "c.parquet", {"text": pa.array(LINES[400:], pa.large_string())})
    write_files(tmp_path, {"notes.txt": "x"})
    documents = read(rows_data("parquet", tmp_path))
    assert [document.content for document in documents] == LINES
    ends = [document.read_bytes for document in documents]
    assert ends == sorted(ends)
    assert ends[-1] == sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    assert texts(rows_data("parquet", tmp_path / "*" / "*.parquet")) == LINES[400:]


def test_rows_of_parquet_that_are_no_text_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"\xffo")]
    )
    write_parquet(tmp_path / "a.parquet", {"text": ["good", None, ""]})
    write_parquet(tmp_path / "b.parquet", {"text": raw})
    write_parquet(tmp_path / "c.parquet", {"content": ["elsewhere"]})
    write_parquet(tmp_path / "d.parquet", {"text": [1]})
    write_files(tmp_path, {"e.parquet": b"PAR1 but no more", "f.parquet": b""})
    write_parquet(tmp_path / "g.parquet", {"text": [{"of": "a struct"}]})
    skipped_records = SkippedRecords()
    assert texts(rows_data("parquet", tmp_path), skipped_records) == ["good", "o"]
    lines = warnings(caplog)
    assert lines[3] == f"{tmp_path}/c.parquet (its columns: content): Parquet file without the column 'text'; skipped"
    assert [line.split(" (")[0] for line in lines] == [
        f"{tmp_path}/a.parquet:2: field 'text' that is not a string; skipped",
        f"{tmp_path}/a.parquet:3: field 'text' that is empty; skipped",
        f"{tmp_path}/b.parquet:1: not UTF-8; skipped",
        f"{tmp_path}/c.parquet",
        f"{tmp_path}/d.parquet:1: field 'text' that is not a string; skipped",
        f"{tmp_path}/e.parquet",
        f"{tmp_path}/f.parquet",
        f"{tmp_path}/g.parquet:1: field 'text' that is not a string; skipped",
    ]
    assert skipped_records.counts["not Parquet"] == 2


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


def test_what_is_no_list_of_token_ids_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = ["[1, 2]", '"text"', "[1.5]", "[[1], [2, 3]]", "null", "[-1]", "[true]", "[99999999999999999999]", "3"]
    values.append(f"[{1 << 63}]")  # NumPy reads it as uint64
    write_files(tmp_path, {"a.jsonl": "\n".join(f'{{"ids": {value}}}' for value in values)})
    [document] = read(rows_data("jsonl", tmp_path, token_field="ids"))
    assert list(document.content) == [1, 2]
    where = f"{tmp_path}/a.jsonl"
    assert warnings(caplog) == [
        *(f"{where}:{line}: field 'ids' that is not a list of token ids; skipped" for line in (2, 3, 4, 5)),
        f"{where}:6: field 'ids' with a negative token id; skipped",
        f"{where}:7: field 'ids' that is not a list of token ids; skipped",
    ]
    folder = tmp_path / "unsigned"
    folder.mkdir()
    parquet.write_table(pa.table({"ids": pa.array([[1 << 63], [7]], pa.list_(pa.uint64()))}), folder / "a.parquet")
    [document] = read(rows_data("parquet", folder, token_field="ids"))
    assert list(document.content) == [7]
    write_files(tmp_path / "none", {"a.jsonl": '{"ids": "text"}'})
    with pytest.raises(DataError) as caught:
        read(rows_data("jsonl", tmp_path / "none", token_field="ids"))
    assert "check path, source and the *_field keys of" in str(caught.value.fix)


def test_token_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "corpus", {"a.jsonl": '{"ids": [1, 2]}\n{"ids": [3, 257]}'})
    data = rows_data("jsonl", tmp_path / "corpus", token_field="ids", cache_folder=str(tmp_path / "cache"))
    with pytest.raises(DataError) as caught:
        prepare(data, BYTES)
    assert "a.jsonl:2 holds the token id 257, but the tokenizer has 257 pieces" in str(caught.value)
    assert "fix: set tokenizer.kind and tokenizer.path to the tokenizer that made the ids" in str(caught.value)


def test_a_field_names_the_group_of_a_row(tmp_path: Path) -> None:
    rows = [{"text": "1", "repo": "x"}, {"text": "2"}, {"text": "3", "repo": 7}, {"text": "4", "repo": None}]
    write_files(tmp_path / "j", {"a.jsonl": "\n".join(map(json.dumps, rows))})
    write_parquet(tmp_path / "p" / "a.parquet", {"text": ["1", "2"], "repo": ["x", None]})
    groups = [document.group for document in read(rows_data("jsonl", tmp_path / "j", group_field="repo"))]
    assert groups == ["x", None, "7", None]
    assert [document.group for document in read(rows_data("parquet", tmp_path / "p", group_field="repo"))] == [
        "x",
        None,
    ]
    assert {document.group for document in read(rows_data("jsonl", tmp_path / "j"))} == {None}


@pytest.fixture
def offline_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline_datasets")
def test_a_dataset_is_streamed_from_a_folder_of_data_files_and_from_what_save_to_disk_wrote(tmp_path: Path) -> None:
    content = "\n".join(json.dumps({"text": line, "repo": "r"}) for line in LINES)
    write_files(tmp_path / "files", {"train.jsonl": content, "test.jsonl": '{"text": "held", "repo": "s"}'})
    table = datasets.table.InMemoryTable.from_pydict({"text": LINES})
    made = datasets.Dataset(table, fingerprint="rows")
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "several"))
    for name in ("files", "one", "several"):
        assert texts(rows_data("huggingface", tmp_path / name)) == LINES
    [held] = read(rows_data("huggingface", tmp_path / "files", split="test", group_field="repo"))
    assert (held.content, held.group) == ("held", "s")


@pytest.mark.usefixtures("offline_datasets")
def test_a_dataset_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_files(tmp_path / "files", {"train.jsonl": '{"text": "one"}'})
    message = refuse(rows_data("huggingface", tmp_path / "files", split="nowhere"))
    assert f"data: the dataset '{tmp_path}/files' cannot be read after 0 rows: " in message
    assert "fix: give a folder, or a name this machine can reach, and a subset and split of it" in message
    assert "the dataset 'no/such-dataset' cannot be read" in refuse(rows_data("huggingface", "no/such-dataset"))
    assert "finds no file at data.path = ''\n  fix: set data.path to a dataset's name" in refuse(
        rows_data("huggingface", "")
    )


@pytest.mark.usefixtures("offline_datasets")
def test_a_dataset_becomes_tokens_and_is_found_again_until_it_changes(tmp_path: Path) -> None:
    write_files(tmp_path / "files", {"train.jsonl": json.dumps({"text": "one"})})
    data = rows_data("huggingface", tmp_path / "files", cache_folder=str(tmp_path / "cache"))
    assert prepare(data, BYTES).sources["corpus"].train.tokens == 4
    assert prepare(data, BYTES).sources["corpus"].train.tokens == 4
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 1
    write_files(tmp_path / "files", {"train.jsonl": json.dumps({"text": "another"})})
    assert prepare(data, BYTES).sources["corpus"].train.tokens == 8


@pytest.mark.parametrize(("source", "package"), [("parquet", "pyarrow"), ("huggingface", "datasets")])
def test_a_missing_extra_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, package: str
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError) as caught:
        check_corpus(rows_data(source, tmp_path))
    extra = "parquet" if source == "parquet" else "hub"
    assert f"data.source = '{source}' needs the package `{package}`, which is not installed" in str(caught.value)
    assert f"fix: pip install 'torchtitan-cp[{extra}]'" in str(caught.value)
