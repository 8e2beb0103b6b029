"""Conversations of a corpus: rows that count and rows that do not, limits of length, masks on disk, resuming."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.support import half_made
from tests.support.chats import TOOLS, call, marked, plain, system, turns, write_rows, write_tokenizer
from tests.support.corpus_cache import contents, only
from tests.support.half_made import stop_after
from tests.support.texts import warnings
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.data import check_sources
from torchtitan_cp.config.sections import Data, DataSource, Stage, StageData
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.curriculum.stages import resolve_stage_data
from torchtitan_cp.data.corpus import cache
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.sources import docstring_conversations
from torchtitan_cp.data.corpus.store import TokenStore, append_documents
from torchtitan_cp.data.corpus.tokenization import fit_conversation
from torchtitan_cp.data.errors import DataError

BYTES = TokenizerConfig(kind="bytes")
SIMPLE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def data_of(folder: Path, rows: Any = None, template: str = SIMPLE, **keys: Any) -> Data:
    """A source of JSON lines in a new folder."""
    if rows is not None:
        write_rows(folder / "rows" / "a.jsonl", rows)
    (folder / "template.jinja").write_text(template)
    fields = {} if "prompt_field" in keys else {"messages_field": "messages"}
    places = {"path": str(folder / "rows"), "cache_folder": str(folder / "cache"), "validation_fraction": 0.0}
    return Data(**{"source": "jsonl", "chat_template": str(folder / "template.jinja"), **places, **fields, **keys})


def marked_text(store: TokenStore) -> list[str]:
    """The documents of bytes, with what is learned in brackets and the end as $."""
    texts = []
    for index, length in enumerate(store.document_lengths.tolist()):
        ids, mask = store.read(index, 0, length), store.read_mask(index, 0, length)
        assert mask is not None
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        pieces = np.split(ids, edges)
        raw = [bytes(token if token < 256 else ord("$") for token in piece).decode() for piece in pieces]
        texts.append("".join(f"[{text}]" if number % 2 else text for number, text in enumerate(raw)))
    return texts


def read(data: Data) -> list[str]:
    return marked_text(only(prepare(data, BYTES)).train)


def row(*contents: Any) -> dict[str, Any]:
    return {"messages": turns(*contents)}


def test_conversations_become_tokens_with_a_mask_and_no_end_of_their_own(tmp_path: Path) -> None:
    rows = [row("é", "b", "c", ""), {"messages": [system("s"), *turns("a</s>", "z")]}]
    assert read(data_of(tmp_path, rows)) == [
        "<user>é<assistant>[b$]<user>c<assistant>[$]",
        "<system>s<user>a$<assistant>[z$]",
    ]
    data = data_of(tmp_path, loss_on="last_assistant")
    assert read(data) == ["<user>é<assistant>b$<user>c<assistant>[$]", "<system>s<user>a$<assistant>[z$]"]
    assert read(data_of(tmp_path, loss_on="all"))[1] == "[<system>s<user>a$<assistant>z$]"
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 3


BAD = [
    ("{", "malformed JSON (Expecting property name"),
    ('["a"]', "no field 'messages' (its fields: none)"),
    ({"text": "a", "id": 1}, "no field 'messages' (its fields: text, id)"),
    ({"messages": []}, "no messages ([])"),
    ({"messages": "a"}, "no messages ('a')"),
    ({"messages": ["a", "b"]}, "message without a role (message 1: 'a'; roles are system, developer, user, "),
    ({"messages": [{"from": "gpt", "value": "a"}]}, "message without a role (message 1: {'from': 'gpt', "),
    (
        {"messages": [{"role": "gpt", "content": "a"}]},
        "unknown role (message 1: {'role': 'gpt', 'content': 'a'}; roles are system, developer, user, ",
    ),
    ({"messages": [*turns("a"), {"role": "assistant"}]}, "content of a wrong type (message 2: "),
    (row("a", 3), "content of a wrong type (message 2: "),
    (row({"a": 1}, "b"), "content of a wrong type (message 1: "),
    (row([{"type": "image"}], "b"), "content of a wrong type (message 1: "),
    (row(0, "b"), "content of a wrong type (message 1: "),
    (
        {"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 0.5}]},
        "weight that is neither 0 nor 1 (message 2: ",
    ),
    (
        {"messages": [*turns("a"), {"role": "assistant", "content": "b", "train": 1}]},
        "weight that is neither 0 nor 1 (message 2: ",
    ),
    (row([{"type": "text", "text": "a"}], "b"), "template error (TypeError: "),
    ({"messages": turns("a", "b"), "tools": "{"}, "tools that are not JSON (Expecting property name"),
    ({"messages": turns("a", "b"), "tools": '"add"'}, "tools that are not a list ('add')"),
    (row("a" * 10_000_000, "b"), "conversation of 10 MB or more (10000001 characters)"),
    (row("\ud800", "b"), "a lone surrogate"),
    (row("a"), "nothing to learn"),
    ({"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 0}]}, "nothing to learn"),
]


def test_bad_rows_are_counted_named_by_file_and_line_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_of(tmp_path, [row("good", "one"), *(bad for bad, _ in BAD), row("good", "two")])
    assert read(data) == ["<user>good<assistant>[one$]", "<user>good<assistant>[two$]"]
    logged = warnings(caplog)
    for number, ((_, problem), line) in enumerate(zip(BAD, logged, strict=False), start=2):
        kind, _, detail = problem.partition(" (")
        where = f"{tmp_path}/rows/a.jsonl:{number}" + f" ({detail}" * bool(detail)
        assert line.startswith(where)
        assert line.endswith(f": {kind}; skipped")
    [folder] = (tmp_path / "cache").glob("*/statistics.json")
    counts = json.loads(folder.read_text())["skipped_records"]
    assert sum(counts.values()) == len(BAD)
    assert (counts["content of a wrong type"], counts["message without a role"], counts["nothing to learn"]) == (
        5,
        2,
        2,
    )


def test_a_template_may_drop_a_switch_that_ends_every_question(tmp_path: Path) -> None:
    """As NVIDIA's Nemotron Nano v2 does."""
    template = "{% for m in messages %}<{{ m.content.replace('/no_think', '') }}>{% endfor %}"
    assert read(data_of(tmp_path, [row("What is it? /no_think", "a b")] * 2, template, loss_on="all"))


@pytest.mark.parametrize(("wrong", "role"), [("assistant", "assistant"), ("user", "user"), ("", "user")])
def test_a_template_that_does_not_write_what_was_said_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str, role: str
) -> None:
    """As with a name that is spelled wrong, and as Idefics 3's does with texts in place of lists of parts."""
    field = f"{{{{ m.text if m.role.startswith('{wrong}') else m.content }}}}"
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{field}{{{{ eos_token }}}}{{% endfor %}}"
    said, silent = row("what?", "this that"), row("", "")
    said["messages"][1]["content"] += ". <think>no</think>it is."
    assert read(data_of(tmp_path, [said, silent], template.replace("m.text", "m.content"), loss_on="all"))
    with pytest.raises(DataError, match="skipped: 1 x content that the template does not write"):
        read(data_of(tmp_path, [said], template, loss_on="all"))
    assert f"a.jsonl:1 (of the {role}: '{'is.' if role == 'assistant' else 'what?'}'): content that" in caplog.text


def test_keys_that_are_null_are_as_no_keys_in_every_kind_of_file(tmp_path: Path) -> None:
    null = {"weight": None, "train": None}
    rows = [{"messages": [turn | null for turn in turns("a", "b")], "tools": None}, row("c", "d") | {"tools": ""}]
    want = ["<user>a<assistant>[b$]", "<user>c<assistant>[d$]"]
    assert read(data_of(tmp_path / "jsonl", rows)) == want
    data = data_of(tmp_path / "parquet", rows)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "parquet" / "rows" / "a.parquet")
    assert read(replace(data, source="parquet")) == want


def test_an_answer_without_content_needs_a_call_that_is_not_empty(tmp_path: Path) -> None:
    keys: list[dict[str, Any]] = [{"tool_calls": None}, {"tool_calls": []}, {"name": "x"}]
    answers = [{"role": "assistant", "content": None, **key} for key in keys]
    rows = [{"messages": [*turns("a"), answer]} for answer in (*answers, {**call(), "content": None})]
    template = SIMPLE.replace(
        "message.role + '>' + message.content", "message.role ~ '>' ~ message.content ~ message.tool_calls"
    )
    [text] = read(data_of(tmp_path, rows, template))
    assert text == f"<user>a<assistant>[{call()['tool_calls']}$]", "null is as no key, as in transformers"


def test_a_source_without_a_good_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(data_of(tmp_path, [bad for bad, _ in BAD[:4]]))
    assert "holds no document; files: 1; skipped: 1 x malformed JSON, 2 x no field 'messages'" in str(caught.value)
    assert "fix: check path, source and the *_field keys of data: files are UTF-8 text, or rows" in str(caught.value)
    with pytest.raises(DataError) as caught:
        read(data_of(tmp_path, [row("a", "b" * 50)], max_document=20, too_long="drop"))
    assert (
        "no document is left: 0 documents are shorter than data.min_document = 0 tokens; 1 x conversation longer"
        in str(caught.value)
    )
    assert "fix: lower min_document; or check max_document, too_long and loss_on" in str(caught.value)


def test_a_template_whose_turns_cannot_be_found_stops_with_file_and_line(tmp_path: Path) -> None:
    rows = [row("a", "b"), row("a", "b", "c", "d")]
    with pytest.raises(DataError, match=r"a.jsonl:2: the chat template changes message 2 \(assistant\)"):
        read(data_of(tmp_path, rows, plain("qwen3")))


def test_a_template_that_teaches_no_end_of_an_answer_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for template, warned in ((SIMPLE, False), (SIMPLE.replace("{{ eos_token }}", ""), True)):
        read(data_of(tmp_path, [row("a", "b")], template))
        assert ("data: under the chat template no token after an answer is learned" in caplog.text) is warned


def test_a_template_that_is_no_jinja_is_refused_before_a_row_is_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the chat template is not valid Jinja: .*unexpected end of template"):
        read(data_of(tmp_path, [row("a", "b")], "{% for m in messages %}{{ m.content "))


def test_prompts_and_completions_are_conversations(tmp_path: Path) -> None:
    rows = [{"q": "a", "a": "b"}, {"q": turns("x", "y", "z"), "a": turns("w", first="assistant")}, {"q": "a"}]
    data = data_of(tmp_path, rows, prompt_field="q", completion_field="a")
    assert read(data) == ["<user>a<assistant>[b$]", "<user>x<assistant>[y$]<user>z<assistant>[w$]"]


@pytest.fixture
def offline_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline_datasets")
def test_rows_of_every_kind_of_source_with_tools_give_the_same_tokens(tmp_path: Path) -> None:
    answer = [call(a=2), {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": [*turns("a"), *answer], "tools": TOOLS}, {"messages": turns("a", "b"), "tools": None}]
    data = data_of(tmp_path, rows, marked("llama3"), source="jsonl")
    expected = read(data)
    assert '[{"name": "add", "parameters": {"a": 2}}' in expected[0]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows" / "a.parquet")
    assert read(data_of(tmp_path, template=marked("llama3"), source="parquet")) == expected
    (tmp_path / "rows" / "a.parquet").unlink()
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert (
        read(data_of(tmp_path, template=marked("llama3"), source="huggingface", path=str(tmp_path / "saved")))
        == expected
    )


def test_a_null_prompt_of_parquet_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    parquet.write_table(pa.table({"q": ["a", None], "a": ["b", "c"]}), tmp_path / "rows" / "a.parquet")
    data = data_of(tmp_path, source="parquet", prompt_field="q", completion_field="a")
    assert read(data) == ["<user>a<assistant>[b$]"]


def test_a_parquet_file_without_the_column_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows").mkdir()
    parquet.write_table(pa.table({"q": ["a"], "body": ["b"]}), tmp_path / "rows" / "a.parquet")
    with pytest.raises(DataError, match="no document"):
        read(data_of(tmp_path, source="parquet", prompt_field="q", completion_field="a"))
    assert "a.parquet (its columns: q, body): Parquet file without the column 'a'; skipped" in warnings(caplog)[0]


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


@settings(max_examples=25, deadline=None)
@given(st.lists(masks, max_size=8), st.data())
def test_masks_are_read_back_from_any_place(tmp_path_factory: pytest.TempPathFactory, every: Any, data: Any) -> None:
    folder = tmp_path_factory.mktemp("store")
    for masks_of_commit in (every[:3], every[3:]):
        documents = [(np.arange(len(mask)), 0) for mask in masks_of_commit]
        append_documents(folder, "train", 100, documents, shard_bytes=16, masks=masks_of_commit)
    store = TokenStore(folder, "train", 100)
    assert store.has_masks
    assert (folder / "train.mask.bin").stat().st_size == sum(-(-len(mask) // 8) for mask in every)
    for document, mask in enumerate(every):
        start = data.draw(st.integers(0, len(mask)))
        stop = data.draw(st.integers(start, len(mask)))
        np.testing.assert_array_equal(store.read_mask(document, start, stop), mask[start:stop])


def test_a_store_of_text_has_no_masks(tmp_path: Path) -> None:
    append_documents(tmp_path, "train", 100, [(np.arange(5), 0)])
    store = TokenStore(tmp_path, "train", 100)
    assert not store.has_masks
    assert store.read_mask(0, 0, 5) is None


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


def test_a_tokenizer_of_the_corpus_is_trained_on_the_text_of_conversations(tmp_path: Path) -> None:
    rows = [row(f"question {n} of many", f"answer {n * n} to it") for n in range(200)]
    data = data_of(tmp_path, rows, loss_on="last_assistant")
    prepared = prepare(data, TokenizerConfig("sentencepiece", vocab_size=320))
    store, tokenizer = only(prepared).train, prepared.tokenizer
    length = int(store.document_lengths[3])
    ids, mask = store.read(3, 0, length), store.read_mask(3, 0, length)
    assert mask is not None
    assert tokenizer.decode(ids) == "<user>question 3 of many<assistant>answer 9 to it"
    assert (ids == tokenizer.eos_id).tolist() == [False] * (len(ids) - 1) + [True]
    assert tokenizer.decode(ids[mask]) == "answer 9 to it"
    assert mask[-1]


def test_a_huggingface_tokenizer_brings_its_template(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer", chat_template=marked("gemma3"))
    data = data_of(tmp_path, [row("a", "b")], chat_template="")
    prepared = prepare(data, TokenizerConfig("huggingface", str(path)))
    store, tokenizer = only(prepared).train, prepared.tokenizer
    ids, mask = contents(store)[0], store.read_mask(0, 0, store.tokens)
    texts = ["<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n", "b<end_of_turn>"]
    whole, learned = (found.tolist() for found, _ in tokenizer.encode_chat_batch(texts))
    assert ids == whole
    assert np.array(ids)[mask].tolist() == learned


CODE = '''class A:
    """Holds a.

    More."""

    def b(self):
        """Gives b."""
        return 1


def c(): pass
'''


def test_docstrings_become_questions_about_their_file() -> None:
    [(about_a, a), (about_b, b)] = docstring_conversations(CODE)
    assert (a["content"], b["content"]) == ("Holds a.", "Gives b.")
    assert about_a["content"] == CODE.replace('    """Holds a.\n\n    More."""\n', "") + "\n\nWhat does A do?"
    assert about_b["content"] == CODE.replace('        """Gives b."""\n', "") + "\n\nWhat does A.b do?"
    assert not list(docstring_conversations("def ("))


def test_conversations_about_docstrings_are_held_out_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / f"m{number}.py").write_text(CODE.replace("b", f"b{number}"))
    (tmp_path / "lib" / "large.py").write_text(CODE + "#" * (1 << 14))
    monkeypatch.setattr("torchtitan_cp.data.corpus.sources.location", lambda source: str(tmp_path / "lib"))
    data = data_of(tmp_path, source="python-docstrings", path="", messages_field="", validation_fraction=0.3)
    prepared = only(prepare(data, BYTES))
    splits = [marked_text(store) for store in (prepared.train, prepared.validation)]
    assert sum(map(len, splits)) == 24
    files = [{text.split("def ")[1].split("(")[0] for text in split} for split in splits]
    assert all(files)
    assert not files[0] & files[1]
    assert all(text.endswith("[Holds a.$]") or "<assistant>[Gives b" in text for split in splits for text in split)


CHAT: dict[str, Any] = {"source": "jsonl", "path": "x", "messages_field": "m"}


@pytest.mark.parametrize(
    ("keys", "message", "fix"),
    [
        ({**CHAT, "messages_field": "", "prompt_field": "p"}, "data has no completion_field", "give both prompt_field"),
        ({**CHAT, "messages_field": "", "completion_field": "p"}, "data has no prompt_field", "or neither"),
        ({**CHAT, "prompt_field": "p", "completion_field": "c"}, "both messages_field and prompt_field", "one of them"),
        ({**CHAT, "text_field": "t"}, "data has both messages_field and text_field", "give one of them"),
        ({**CHAT, "token_field": "t"}, "data has both messages_field and token_field", "give one of them"),
        ({"loss_on": "all"}, "data.loss_on applies to conversations only", "set data.messages_field"),
        ({"too_long": "drop"}, "data.too_long applies to conversations only", "or remove too_long"),
        ({"messages_field": "m"}, "data.messages_field does nothing with source = 'python-stdlib'", "use source = "),
    ],
)
def test_keys_that_do_not_fit_conversations_are_refused(keys: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sources(Data(**keys), has_tokenizer=True)
    assert message in str(caught.value)
    assert fix in str(caught.value)
    check_sources(Data(**CHAT, loss_on="all", too_long="drop", chat_template="x"), has_tokenizer=True)
    check_sources(Data(source="python-docstrings", too_long="drop"), has_tokenizer=True)


def test_a_stage_that_reads_conversations_packs_them_whole_and_apart() -> None:
    sources = (DataSource(name="chat", **CHAT), DataSource(name="text", source="text", path="x"))

    def resolved(stage: StageData, **keys: Any) -> tuple[Any, ...]:
        found = resolve_stage_data(Data(sources=sources, **keys), Stage(data=stage))
        return found.packing, found.document_mask, found.restart_positions

    assert resolved(StageData()) == ("best_fit", True, True)
    assert resolved(StageData(mixture={"text": 1.0})) == ("concat", False, False)
    assert resolved(StageData(), mixture={"text": 1.0, "chat": 0.0}) == ("concat", False, False)
    assert resolved(StageData(mixture={"text": 1.0, "chat": 0.5})) == ("best_fit", True, True)
    assert resolved(StageData(packing="concat"), document_mask=False) == ("concat", False, False)
