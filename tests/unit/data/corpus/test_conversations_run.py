"""Conversations from rows to tokens: what counts and what does not, from every kind of source."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.chats import TOOLS, call, marked, plain, system, turns, write_tokenizer
from tests.support.conversations import BYTES, SIMPLE, data_of, marked_text, read, row
from tests.support.corpus_cache import contents, only
from tests.support.texts import warnings
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.sources import docstring_conversations
from torchtitan_cp.data.errors import DataError


def test_conversations_become_tokens_with_a_mask_and_no_end_of_their_own(tmp_path: Path) -> None:
    rows = [row("é", "b", "c", ""), {"messages": [system("s"), *turns("a</s>", "z")]}]
    assert read(data_of(tmp_path, rows)) == [
        "<user>é<assistant>[b$]<user>c<assistant>[$]",
        "<system>s<user>a$<assistant>[z$]",
    ]
    beside = data_of(tmp_path, [{"messages": turns("a</s>", "z"), "system": "s"}])
    assert read(beside) == ["<system>s<user>a$<assistant>[z$]"]
    data = data_of(tmp_path, rows, loss_on="last_assistant")
    assert read(data) == ["<user>é<assistant>b$<user>c<assistant>[$]", "<system>s<user>a$<assistant>[z$]"]
    assert read(data_of(tmp_path, rows, loss_on="all"))[1] == "[<system>s<user>a$<assistant>z$]"
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 4


BAD = [
    ("{", "malformed JSON (Expecting property name"),
    ('["a"]', "no field 'messages' (its fields: none)"),
    ({"text": "a", "id": 1}, "no field 'messages' (its fields: text, id)"),
    ({"messages": []}, "no messages ([])"),
    ({"messages": "a"}, "no messages ('a')"),
    ({"messages": ["a", "b"]}, "message without a role (message 1: 'a'; roles are system, developer, user, "),
    ({"messages": [{"value": "a"}]}, "message without a role (message 1: {'value': 'a'}; roles are system, "),
    (
        {"messages": [*turns("a"), {"from": "narrator", "value": "b"}]},
        "unknown role (message 2: {'role': 'narrator', 'content': 'b'}; roles are system, developer, user, ",
    ),
    ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role (message 1: {'role': 'narrator', "),
    ({"messages": [{"role": 3, "content": "a"}]}, "unknown role (message 1: {'role': 3, "),
    (
        {"messages": [*turns("a"), {"from": "function_call", "value": "add(2)"}]},
        "function_call that is not the JSON of a call (Expecting value",
    ),
    (
        {"messages": [*turns("a"), {"from": "function_call", "value": '{"a": 2}'}]},
        """function_call that is not the JSON of a call ('{"a": 2}')""",
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
    ({"messages": turns("a", "b"), "system": {"text": "c"}}, "system prompt that is not a text ({'text': 'c'})"),
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


def test_rows_of_from_and_value_are_those_of_role_and_content(tmp_path: Path) -> None:
    said = [("system", "s"), ("human", "a"), ("gpt", "b"), ("observation", "c"), ("model", "d")]
    shared = [{"conversations": [{"from": name, "value": text} for name, text in said]}]
    expected = "<system>s<user>a<assistant>[b$]<tool>c<assistant>[d$]"
    assert read(data_of(tmp_path, shared, messages_field="conversations")) == [expected]
    mixed = [{"from": "human", "value": "a"}, {"role": "gpt", "content": "b", "weight": 0}, *turns("c", "d")]
    rows = [{"p": mixed[:3], "c": [{"from": "gpt", "value": "d"}]}]
    (tmp_path / "prompts").mkdir()
    data = data_of(tmp_path / "prompts", rows, prompt_field="p", completion_field="c")
    assert read(data) == ["<user>a<assistant>b$<user>c<assistant>[d$]"]
    parquet_folder = tmp_path / "parquet"
    parquet_folder.mkdir()
    parquet.write_table(pa.Table.from_pylist(shared), parquet_folder / "a.parquet")
    data = data_of(tmp_path, messages_field="conversations", source="parquet", path=str(parquet_folder))
    assert read(data) == [expected]


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


def test_a_list_of_parts_that_a_template_prints_as_python_does_is_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    parts = [{"type": "text", "text": "it's"}]
    data = data_of(tmp_path, [row(parts, "b"), row("a", parts), row("a", "b")], template, loss_on="all")
    assert read(data) == ["[<user>a$<assistant>b$]"]
    kind = "content of parts that the template prints as a list; skipped"
    assert [line.rpartition("/")[2] for line in warnings(caplog)[:-1]] == [
        f"a.jsonl:{line} (message {line}): {kind}" for line in (1, 2)
    ]


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
    # Arguments that other rows do not have: Arrow adds them to these rows, as null.
    rows += [{"messages": [*turns("a"), call(**given)], "tools": TOOLS} for given in ({"path": "b"}, {"content": "c"})]
    data = data_of(tmp_path, rows, marked("llama3"), source="jsonl")
    expected = read(data)
    for text, given in zip([expected[0], *expected[2:]], ('"a": 2', '"path": "b"', '"content": "c"'), strict=True):
        assert f'[{{"name": "add", "parameters": {{{given}}}}}' in text
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
