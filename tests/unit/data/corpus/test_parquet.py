"""Parquet files of every shape give the rows that were written, and only what is damaged is left out."""

import base64
import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyarrow.parquet import encryption

from tests.support.deep import deep_rows
from tests.support.texts import texts, warnings
from torchtitan_cp.config.data import Data
from torchtitan_cp.data.corpus.parquet import read_parquet
from torchtitan_cp.data.corpus.records import Document, SkippedRecords
from torchtitan_cp.data.corpus.sources import find_files
from torchtitan_cp.data.errors import DataError


def parquet_data(path: Path, **keys: Any) -> Data:
    return Data(source="parquet", path=str(path), **{"validation_fraction": 0.0, **keys})


def read_rows(data: Data, skipped: SkippedRecords | None = None) -> Iterator[Document]:
    for file in find_files(data):
        yield from read_parquet(file, data, skipped or SkippedRecords())


def word(draw: random.Random) -> str:
    return draw.choice(["", "a", "wörter", "0123456789" * draw.randrange(40), f"word {draw.random()}"])


def nullable(draw: random.Random, value: Any, share: float = 0.1) -> Any:
    return None if draw.random() < share else value


STRINGS = [
    pa.string(),
    pa.large_string(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.string()),
]
LISTS = [pa.list_, pa.large_list]


def draw_messages(draw: random.Random) -> tuple[pa.DataType, Any]:
    """A type of messages, and a function that draws a value of it."""
    role, content, list_of = draw.choice(STRINGS), draw.choice(STRINGS[:3]), draw.choice(LISTS)
    parts = pa.list_(pa.struct({"type": role, "text": content}))
    content = draw.choice([content, content, parts])
    call = pa.struct({"name": pa.string(), "arguments": pa.map_(pa.string(), draw.choice(STRINGS[:3]))})
    fields = {"role": role, "content": content, "tool_calls": pa.list_(call)}
    as_map = content in STRINGS and draw.random() < 0.2

    def message() -> Any:
        text: Any = word(draw)
        if content == parts:
            text = [{"type": "text", "text": nullable(draw, word(draw))} for _ in range(draw.randrange(3))]
        value = {"role": draw.choice(["user", "assistant", "tool"]), "content": nullable(draw, text)}
        if as_map:
            return value
        calls = [{"name": word(draw), "arguments": {"x": word(draw), "y": None}} for _ in range(draw.randrange(3))]
        return {**value, "tool_calls": nullable(draw, calls, 0.5)}

    kind = list_of(pa.map_(pa.string(), content) if as_map else pa.struct(fields))
    return kind, lambda: nullable(draw, [message() for _ in range(draw.randrange(5))])


def write_drawn(draw: random.Random, folder: Path, kinds: dict[str, pa.DataType], table: list[dict[str, Any]]) -> None:
    """Write the rows to several files, with row groups, pages and encodings of any size and kind."""
    edges = sorted(draw.randrange(len(table) + 1) for _ in range(draw.randrange(3)))
    for number, (start, stop) in enumerate(zip([0, *edges], [*edges, len(table)], strict=True)):
        columns = [(name, pa.array([row.get(name) for row in table[start:stop]], kind)) for name, kind in kinds.items()]
        draw.shuffle(columns)
        parquet.write_table(
            pa.table(dict(columns)),
            folder / f"{number}.parquet",
            row_group_size=draw.choice([1, 7, 30, 100, 1000]),
            data_page_size=draw.choice([4096, 1 << 20]),
            dictionary_pagesize_limit=draw.choice([64, 1 << 20]),
            use_dictionary=draw.choice([True, False]),
            compression=draw.choice(["none", "snappy", "zstd"]),
            data_page_version=draw.choice(["1.0", "2.0"]),
            store_schema=draw.choice([True, True, False]),
        )


@deep_rows("seed", range(120), default=range(6))
def test_conversations_are_the_rows_that_were_written(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    kind, messages = draw_messages(draw)
    table = [{"messages": messages(), "id": index} for index in range(draw.choice([3, 100, 400]))]
    kinds, keys = {"messages": kind, "id": pa.int64()}, {"messages_field": "messages"}
    if draw.random() < 0.5:
        kinds["tools"] = draw.choice([pa.list_(pa.struct({"name": STRINGS[2]})), pa.string()])
        for row in table:
            tool = word(draw)
            row["tools"] = nullable(draw, tool if kinds["tools"] == pa.string() else [{"name": tool}])
    if draw.random() < 0.5:
        kinds["system"] = draw.choice(STRINGS[:3])
        for row in table:
            row["system"] = nullable(draw, word(draw))
    if draw.random() < 0.5:
        kinds["group"], keys["group_field"] = draw.choice(STRINGS[:3]), "group"
        for row in table:
            row["group"] = nullable(draw, word(draw))
    write_drawn(draw, tmp_path, kinds, table)
    skipped = SkippedRecords()
    documents = list(read_rows(parquet_data(tmp_path, **keys), skipped))
    assert not skipped.counts
    wanted = kinds.keys() - {"id"}
    assert [document.row for document in documents] == [{name: row[name] for name in wanted} for row in table]
    assert [document.group for document in documents] == [row.get("group") for row in table]


@deep_rows("seed", range(120), default=range(6))
def test_texts_and_token_ids_are_the_rows_that_were_written(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    length = range(draw.choice([3, 100, 400]))
    kinds = {
        "text": draw.choice([*STRINGS[:3], pa.string_view()]),
        "ids": draw.choice([*LISTS, pa.list_view])(draw.choice([pa.int32(), pa.uint16(), pa.int64()])),
        "pair": pa.list_(pa.dictionary(pa.int32(), pa.int32()), draw.choice([2, -1])),
    }
    table = [
        {
            "text": nullable(draw, word(draw)),
            "ids": nullable(draw, [draw.randrange(9000) for _ in range(draw.randrange(40))]),
            "pair": [index, draw.randrange(3)],
        }
        for index in length
    ]
    write_drawn(draw, tmp_path, kinds, table)
    for name, key in (("text", "text_field"), ("ids", "token_field"), ("pair", "token_field")):
        skipped = SkippedRecords()
        found = [document.content for document in read_rows(parquet_data(tmp_path, **{key: name}), skipped)]
        written = [row[name] for row in table if row[name]]
        assert [value if name == "text" else value.tolist() for value in found] == written
        assert sum(skipped.counts.values()) == len(table) - len(written), "those that are null or empty"


def conversations(count: int, text: str, kind: pa.DataType = STRINGS[0]) -> pa.Table:
    rows = [[{"role": "user", "content": f"{index}"}, {"role": "assistant", "content": text}] for index in range(count)]
    return pa.table({"messages": pa.array(rows, pa.list_(pa.struct({"role": STRINGS[2], "content": kind})))})


@pytest.mark.deep  # 2.3 GB of text
@pytest.mark.parametrize("text_is_stored_once", [False, True])
@pytest.mark.parametrize("row_group_rows", [10, 260])
def test_more_text_than_a_nested_column_of_pyarrow_can_hold_is_read(
    tmp_path: Path, row_group_rows: int, text_is_stored_once: bool
) -> None:
    some = conversations(10, "x" * 9_000_000)
    options = {"use_dictionary": text_is_stored_once, "compression": "zstd"}
    with parquet.ParquetWriter(tmp_path / "a.parquet", some.schema, **options) as writer:
        for _ in range(0, 260, row_group_rows):
            writer.write_table(pa.concat_tables([some] * (row_group_rows // 10)), row_group_size=row_group_rows)
    skipped = SkippedRecords()
    documents = read_rows(parquet_data(tmp_path, messages_field="messages"), skipped)
    assert [len(document.row["messages"][1]["content"]) for document in documents] == [9_000_000] * 260
    assert not skipped.counts


@pytest.mark.parametrize("row_group_rows", [16, 64])
def test_memory_holds_no_more_than_a_row_group(tmp_path: Path, row_group_rows: int) -> None:
    text, count = "x" * 200_000, 128
    path = tmp_path / "a.parquet"
    parquet.write_table(
        conversations(count, text), path, row_group_size=row_group_rows, use_dictionary=False, compression="none"
    )
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        assert len(list(read_rows(parquet_data(tmp_path, messages_field="messages")))) == count
    finally:
        pa.set_memory_pool(before)
    read_bytes = row_group_rows * len(text)
    assert read_bytes < pool.max_memory() < 4 * read_bytes, "as stored, and as columns that grow by doubling"


def test_batches_that_pyarrow_refuses_are_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(conversations(30, "answer"), tmp_path / "a.parquet", row_group_size=20)
    whole, refused = parquet.ParquetFile.iter_batches, list[int]()

    def refuse(self: Any, batch_size: int, **options: Any) -> Iterator[Any]:
        for number, batch in enumerate(whole(self, 5 if batch_size > 1 else 1, **options)):
            if batch_size > 1 and number == 2:
                refused.append(batch_size)
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", refuse)
    documents = read_rows(parquet_data(tmp_path, messages_field="messages"))
    assert [document.row["messages"][0]["content"] for document in documents] == [*map(str, range(30))]
    assert len(refused) == 1


def test_only_the_rows_behind_damage_in_their_row_group_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [os.urandom(500).hex() for _ in range(3000)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": lines}), path, row_group_size=1000, use_dictionary=False)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 100_000] = bytes(100_000)
    path.write_bytes(content)
    skipped = SkippedRecords()
    documents = list(read_rows(parquet_data(tmp_path), skipped))
    assert [document.content for document in documents if document.content not in lines] == []
    numbers = [int(document.key.rpartition(":")[2]) for document in documents]
    assert [lines[number - 1] for number in numbers] == [document.content for document in documents]
    kept = len(numbers) - 2000
    assert 0 <= kept < 600
    assert numbers == [*range(1, 1001 + kept), *range(2001, 3001)]
    assert skipped.counts == {"rest of a damaged row group": 1}
    assert warnings(caplog)[0].startswith(f"{path}:{1001 + kept} (up to row 2000: ")


@pytest.mark.parametrize("key", [{"text_field": "text"}, {"messages_field": "messages"}])
@deep_rows("seed", range(40), default=[0])
def test_whatever_is_damaged_no_row_is_lost_without_a_word(tmp_path: Path, key: dict[str, str], seed: int) -> None:
    draw, path = random.Random(seed), tmp_path / "a.parquet"
    table = conversations(60, "answer").append_column("text", pa.array([f"text {index}" for index in range(60)]))
    parquet.write_table(table, path, row_group_size=15, compression=draw.choice(["none", "snappy", "zstd", "gzip"]))
    content = path.read_bytes()
    for _ in range(40):
        at, length = draw.randrange(len(content)), draw.choice([1, 4, 50, 500])
        path.write_bytes(content[:at] + draw.randbytes(min(length, len(content) - at)) + content[at + length :])
        skipped, found, refused = SkippedRecords(quiet=True), 0, ""
        try:
            found = len(list(read_rows(parquet_data(tmp_path, **key), skipped)))
        except DataError as error:
            refused = error.message
        assert found == 60 or skipped.counts or "which need not be damaged" in refused


def refusal(data: Data) -> str:
    with pytest.raises(DataError) as caught:
        list(read_rows(data))
    return str(caught.value)


def test_two_columns_of_one_name_are_refused_where_that_name_is_read(tmp_path: Path) -> None:
    columns = [pa.array(["one"]), pa.array(["two"]), pa.array(["three"]), pa.array(["four"])]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_arrays(columns, names=["text", "other", "other", "Text"]), path)
    assert texts(parquet_data(tmp_path)) == ["one"]
    message = refusal(parquet_data(tmp_path, text_field="other"))
    assert message.startswith(f"{path} has 2 columns with the name 'other'\n  fix: rename or remove all but one")
    assert "2 columns with the name 'other'" in refusal(parquet_data(tmp_path, group_field="other"))


def test_two_fields_or_keys_of_one_name_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    message = pa.StructArray.from_arrays([pa.array(["user"]), pa.array(["system"])], ["role", "role"])
    fields = pa.table({"messages": pa.ListArray.from_arrays([0, 1], message)})
    keys = pa.table(
        {"messages": pa.array([[[("role", "user"), ("role", "system")]]], pa.list_(pa.map_(*["string"] * 2)))}
    )
    for name, table in (("a", fields), ("b", keys)):
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    skipped = SkippedRecords()
    assert list(read_rows(parquet_data(tmp_path, messages_field="messages"), skipped)) == []
    assert skipped.counts == {"value that Python cannot hold": 2}
    assert [line.split(" (")[0] for line in warnings(caplog)] == [f"{tmp_path}/{name}.parquet:1" for name in ("a", "b")]


class KeyService(encryption.KmsClient):
    """Keeps keys as they are."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, _: str) -> bytes:
        return base64.b64encode(key_bytes)


def test_an_encrypted_column_is_refused_and_not_taken_for_damage(tmp_path: Path) -> None:
    configuration = encryption.EncryptionConfiguration("footer", column_keys={"text": ["text"]}, plaintext_footer=True)
    factory, path, table = encryption.CryptoFactory(KeyService), tmp_path / "a.parquet", pa.table({"text": ["secret"]})
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), configuration)
    with parquet.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    message = refusal(parquet_data(tmp_path))
    assert f"cannot read {path}, which need not be damaged: Cannot decrypt" in message
    assert "fix: write the file anew" in message


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowNotImplementedError("Support for codec 'lzo' not built"),
        pa.ArrowMemoryError("malloc of size 64 failed"),
        OSError("Not yet implemented: bit-packed levels"),
        OSError(errno.ESTALE, "Error reading bytes from file. Detail: [errno 116] Stale file handle"),
        None,
    ],
)
def test_what_pyarrow_or_the_system_cannot_read_is_refused_and_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["one", "two"]}), path)
    whole = parquet.ParquetFile.iter_batches

    def fail(self: Any, batch_size: int, **options: Any) -> Iterator[Any]:
        yield next(whole(self, 1, **options))
        if error:
            raise error

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", fail)
    message = refusal(parquet_data(tmp_path))
    if isinstance(error, OSError) and error.errno:
        assert message.startswith(f"{path} cannot be read after record 1: Stale file handle\n  fix: see to the disk")
    else:
        reason = str(error or "it finds 1 of 2 rows in row group 0")
        assert message.startswith(f"pyarrow {pa.__version__} cannot read {path}, which need not be damaged: {reason}")
