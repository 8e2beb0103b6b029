"""What is said of records that are skipped."""

from pathlib import Path

import pytest

from tests.support.texts import text_data, texts, warnings, write_files
from torchtitan_cp.data.corpus.records import SkippedRecords


def test_only_the_first_five_of_a_kind_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, {f"{index}.txt": b"\xff" for index in range(7)} | {"good": "good"})
    skipped_records = SkippedRecords()
    texts(text_data(tmp_path), skipped_records)
    assert len(warnings(caplog)) == 5
    assert skipped_records.summary() == "7 x not UTF-8"
