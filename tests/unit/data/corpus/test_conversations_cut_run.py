"""Conversations that are too long, and masks on disk: cut as told, counted, made again if damaged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import half_made
from tests.support.chats import write_rows
from tests.support.conversations import BYTES, data_of, marked_text, read, row
from tests.support.corpus_cache import contents, only
from tests.support.half_made import stop_after
from tests.support.texts import warnings
from torchtitan_cp.data.corpus import cache
from torchtitan_cp.data.corpus.cache import prepare

LONG = row("abc", "defg", "h", "ijklmnop")  # 20 tokens and 5 that are learned, 18 and 9
TURNS = ["<user>abc<assistant>[defg$]", "<user>h<assistant>[ijklmnop$]"]
LONGER, CUT, NOTHING = "conversation longer than max_document", "cut in a turn that is learned", "nothing to learn"


@pytest.mark.parametrize(
    ("too_long", "most", "kept", "counts"),
    [
        ("split", 52, ["".join(TURNS)], {}),
        ("split", 30, TURNS, {LONGER: 1}),
        (
            "split",
            23,
            ["<user>abc<assistant>[def]", "[g$]", "<user>h<assistant>[ijklm]", "[nop$]"],
            {LONGER: 1, CUT: 2},
        ),
        ("truncate_right", 30, [TURNS[0] + "<user"], {LONGER: 1}),
        ("truncate_right", 22, ["<user>abc<assistant>[de]"], {LONGER: 1, CUT: 1}),
        ("truncate_right", 20, [], {LONGER: 1, NOTHING: 1}),
        ("truncate_left", 30, ["[fg$]" + TURNS[1]], {LONGER: 1, CUT: 1}),
        ("truncate_left", 27, TURNS[1:], {LONGER: 1}),
        ("drop", 51, [], {LONGER: 1}),
    ],
)
def test_a_conversation_that_is_too_long_is_cut_as_told_and_counted(
    tmp_path: Path, too_long: str, most: int, kept: list[str], counts: dict[str, int]
) -> None:
    data = data_of(tmp_path, [row("", ""), LONG, row("", "")], max_document=most, too_long=too_long)
    prepared, short = only(prepare(data, BYTES)), "<user><assistant>[$]"
    assert marked_text(prepared.train) == [short, *kept, short]
    assert prepared.statistics.skipped_records == counts


@pytest.mark.parametrize(
    ("too_long", "expected"),
    [
        ("split", f"; left out or cut: 1 x {LONGER}, 2 x {CUT}, 1 x {NOTHING}"),
        ("truncate_right", f"; left out or cut: 1 x {LONGER}, 1 x {CUT}, 1 x {NOTHING}"),
        ("drop", f"; left out or cut: 1 x {LONGER}, 1 x {NOTHING}"),
    ],
)
def test_what_is_cut_or_left_out_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, too_long: str, expected: str
) -> None:
    caplog.set_level("INFO")
    prepare(data_of(tmp_path, [row("a"), row("", ""), LONG], max_document=23, too_long=too_long), BYTES)
    assert any(record.getMessage().endswith(expected) for record in caplog.records)


def test_rows_and_parts_with_nothing_to_learn_are_counted_together(tmp_path: Path) -> None:
    data = data_of(tmp_path, [row("a"), row("", ""), LONG], max_document=20, too_long="truncate_right")
    assert only(prepare(data, BYTES)).statistics.skipped_records == {LONGER: 1, NOTHING: 2}


def many(folder: Path) -> None:
    for part in range(4):
        rows = [row(f"q{n} " * (n % 30), f"a{n} " * (n % 9), "c", f"{n}") for n in range(part, 200, 4)]
        write_rows(folder / "rows" / f"{part}.jsonl", [r if n % 17 else "{" for n, r in enumerate(rows)])


def test_a_pass_that_is_stopped_anywhere_gives_the_same_masks(
    tmp_path: Path,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many(tmp_path)
    keys: dict[str, Any] = {"max_document": 100, "validation_fraction": 0.2}
    prepare(data_of(tmp_path, **keys, cache_folder=str(tmp_path / "straight")), BYTES)
    expected = half_made.files(tmp_path / "straight")
    assert len(expected["train.mask.bin"]) > 1000 < len(expected["train-00000.bin"])
    assert json.loads(expected["statistics.json"])["skipped_records"][LONGER] > 20
    for last in range(40, 190, 29):
        data = data_of(tmp_path, **keys, cache_folder=str(tmp_path / str(last)))
        stop_after(monkeypatch, data, last)
        stop_after(monkeypatch, data, 1)
        prepare(data, BYTES)
        assert half_made.files(tmp_path / str(last)) == expected


def test_a_damaged_mask_is_made_again_and_masks_are_in_the_fingerprint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_of(tmp_path, [row("a", "b", "c", "d")])
    expected = read(data)
    [path] = (tmp_path / "cache").glob("*/train.mask.bin")
    path.write_bytes(b"")
    assert read(data) == expected
    assert "is damaged (train.mask.bin has 0 bytes instead of 5)" in warnings(caplog)[0]
    last = data_of(tmp_path, loss_on="last_assistant")
    first, second = (only(prepare(each, BYTES)) for each in (data, last))
    assert contents(first.train) == contents(second.train)
    assert first.fingerprint != second.fingerprint


def test_tokens_of_conversations_by_another_version_are_made_again_and_those_of_text_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = data_of(tmp_path, [{**row("a", "b"), "id": "text"}])
    text = replace(chats, messages_field="", chat_template="", text_field="id")
    for version, folders in ((cache.CHAT_VERSION, 2), (cache.CHAT_VERSION + 1, 3)):
        monkeypatch.setattr(cache, "CHAT_VERSION", version)
        prepare(chats, BYTES)
        prepare(text, BYTES)
        assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == folders
