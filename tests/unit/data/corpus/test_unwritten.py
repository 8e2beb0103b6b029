"""Rows as transformers' apply_chat_template writes them, over templates with names, or refused for what they lose."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.support.chats import (
    FORMS,
    SPECIAL,
    TOOLS,
    VARIABLES,
    call,
    marked,
    plain,
    system,
    turns,
    write_llama_model,
    write_rows,
    write_templates,
    write_tokenizer,
)
from tests.support.corpus_cache import only
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.chat import ChatTemplate, find_chat_template, read_conversation
from torchtitan_cp.data.corpus.encoding import learned_tokens
from torchtitan_cp.data.corpus.records import BadRecordError
from torchtitan_cp.data.corpus.tokenizer import load_tokenizer
from torchtitan_cp.data.errors import DataError

SOURCE = Data(source="jsonl", messages_field="messages")
# Llama 3's first: no tools, no calls, no reasoning.
FIRST_LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Calls as XML, after the words, and a thought before them in every turn.
XML = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</function>{% endfor %}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {"first": FIRST_LLAMA3, "xml": XML} | {
    f"{family} {mark.__name__}": mark(family)
    for family in ("chatml", "llama3", "mistral", "qwen3", "gpt_oss", "gemma3")
    for mark in (marked, plain)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    write_tokenizer(folder)
    write_llama_model(folder / "tokenizer.model", control_symbols=list(SPECIAL[2:]))
    return folder


@cache
def both(folder: Path, kind: str, form: str, default: str, tool_use: str) -> tuple[Any, Any, ChatTemplate]:
    """transformers' tokenizer of a folder, ours, and our template."""
    own = folder / f"{kind} {form} {default} {tool_use}"
    own.mkdir()
    (own / kind).symlink_to(folder / kind)
    classes = {"tokenizer.json": "PreTrainedTokenizerFast", "tokenizer.model": "LlamaTokenizer"}
    values = {
        **VARIABLES,
        "tokenizer_class": classes[kind],
        **write_templates(own, form, TEMPLATES[default], TEMPLATES[tool_use]),
    }
    (own / "tokenizer_config.json").write_text(json.dumps(values))
    name = {"tokenizer.json": "huggingface", "tokenizer.model": "sentencepiece"}[kind]
    config = TokenizerConfig(kind=name, path=str(own / kind))
    template = find_chat_template(SOURCE, config, None)
    assert template
    return AutoTokenizer.from_pretrained(own), load_tokenizer(config), template


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Conversations in which every word stands once: prompts of a system, calls, results, thoughts and tools."""
    number = 0

    def word() -> str:
        nonlocal number
        number += 1
        return draw(st.sampled_from(["", "é ", "two\n"])) + f"w{number}x"

    def answer(text: bool) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": word() if text else draw(st.sampled_from(["", None])),
        }
        if draw(st.integers(0, 4)) == 0:
            message[draw(st.sampled_from(["reasoning_content", "thinking", "reasoning"]))] = word()
        return message

    messages: list[dict[str, Any]] = [system(word())] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": word()})
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            calls = [call(a=word(), b=draw(st.integers(0, 9))) for _ in range(draw(st.sampled_from([1, 1, 2])))]
            functions = [function for each in calls for function in each["tool_calls"]]
            messages.append({**answer(draw(st.integers(0, 3)) == 0), "tool_calls": functions})
            messages += [{"role": "tool", "content": word()} for _ in functions]
        messages.append(answer(True))
    tools: list[Any] = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": word()}} for _ in range(2)]
    return {"messages": messages, "tools": draw(st.sampled_from([None, None, [], tools[:1], tools]))}


def words_of(row: dict[str, Any]) -> dict[str, list[str]]:
    """The words of a row, by what they are."""
    found: dict[str, list[str]] = {"tools": [tool["function"]["name"] for tool in row["tools"] or []]}
    for message in row["messages"]:
        found.setdefault("content", []).append(message["content"] or "")
        calls = [each["function"]["arguments"]["a"] for each in message.get("tool_calls", [])]
        found.setdefault("tool call", []).extend(calls)
        thoughts = [message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message]
        found.setdefault("reasoning", []).extend(thoughts)
    return {kind: [text.split()[-1] for text in texts if text] for kind, texts in found.items()}


def result_of(row: dict[str, Any], template: ChatTemplate, **keys: Any) -> tuple[str, str, list[tuple[int, int]]]:
    """`written`, `needs marks` or what is wrong with a row; its text; what of it is learned."""
    try:
        return "written", *read_conversation(row, replace(SOURCE, **keys), template)
    except BadRecordError as error:
        return error.args[0], "", []
    except DataError:
        return "needs marks", "", []


def check_row(theirs: Any, ours: Any, template: ChatTemplate, row: dict[str, Any]) -> str:
    """Compare a row with transformers. Returns what became of it."""
    options = {"tools": row["tools"], "return_dict": True, "return_assistant_tokens_mask": True}
    try:
        expected = theirs.apply_chat_template(row["messages"], **options)
        written = theirs.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
    except Exception:  # a template raises whatever its author chose
        with pytest.raises(BadRecordError, match=r"template error|no chat template named default"):
            read_conversation(row, SOURCE, template)
        return "template error"
    lost = {kind for kind, words in words_of(row).items() if any(word not in written for word in words)}
    outcome, text, learned = result_of(row, template)
    if outcome == "needs marks":
        assert not any(expected["assistant_masks"])
    elif outcome != "written":
        assert outcome.partition(" that the template ")[0] in lost
    if outcome != "written":
        return outcome
    assert text == written
    assert not lost
    [(ids, starts)] = ours.encode_chat_batch([text])
    assert ids.tolist() == expected["input_ids"]
    if any(expected["assistant_masks"]):
        assert learned_tokens(starts, learned).tolist() == list(map(bool, expected["assistant_masks"]))
    return "written"


choices = st.tuples(st.sampled_from(FORMS), st.sampled_from([*TEMPLATES]), st.sampled_from([*TEMPLATES]))


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        ("tokenizer.json", 30),
        *(pytest.param(kind, 400, marks=pytest.mark.deep) for kind in ("tokenizer.json", "tokenizer.model")),
    ],
)
def test_a_row_has_the_ids_of_transformers_or_is_refused_for_what_is_lost(
    folder: Path, kind: str, examples: int
) -> None:
    outcomes = set()

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(choices, rows())
    def draw(chosen: tuple[str, str, str], row: dict[str, Any]) -> None:
        outcomes.add(check_row(*both(folder, kind, *chosen), row))

    draw()
    assert outcomes >= {"written", "template error", "reasoning that the template does not write"}
    if examples > 100:
        assert outcomes == {
            *("written", "template error", "needs marks", "reasoning that the template leaves out of earlier turns"),
            *(f"{kind} that the template does not write" for kind in ("content", "reasoning", "tool call", "tools")),
        }


def lost(source: str, messages: Any, tools: Any = None, **keys: Any) -> str:
    """What the template loses of a row; empty if it writes all."""
    outcome, _, _ = result_of({"messages": messages, "tools": tools}, ChatTemplate(source, VARIABLES), **keys)
    kind, reads, _ = outcome.partition(" that the template ")
    assert reads or outcome == "written"
    return kind * bool(reads)


def called(*names: str, **message: Any) -> dict[str, Any]:
    """The assistant calls functions."""
    calls = [{"id": "1", "type": "function", "function": {"name": name, "arguments": {"a": "a"}}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls, **message}


RESULT = [{"role": "tool", "content": "5"}, {"role": "assistant", "content": "a"}]


def test_rows_that_lose_something_are_counted_by_what_they_lose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"messages": turns("What is 2 + 3?", "It is 5.")}
    bad = [
        {"messages": [*turns("What?"), called("add"), *RESULT]},
        {"messages": [*turns("What?"), {"role": "assistant", "content": "5", "reasoning_content": "Let me see."}]},
        {**good, "tools": TOOLS},
        {"messages": [system(" "), *turns("What?"), {**called("add"), "content": None}, *RESULT]},
    ]
    write_rows(tmp_path / "rows.jsonl", [row for row in bad for _ in range(50)] + [good] * 3)
    (tmp_path / "first.jinja").write_text(FIRST_LLAMA3)
    keys = {"path": str(tmp_path / "rows.jsonl"), "cache_folder": str(tmp_path / "cache"), "validation_fraction": 0.0}
    data = replace(SOURCE, **keys, chat_template=str(tmp_path / "first.jinja"))
    prepared = only(prepare(data, TokenizerConfig(kind="bytes")))
    assert prepared.statistics.skipped_records == {
        "tool call that the template does not write": 100,
        "reasoning that the template does not write": 50,
        "tools that the template does not write": 50,
    }
    assert prepared.statistics.train.documents == 3
    lines = "1 (of the assistant: 'add'): tool call", "51 (of the assistant: 'see.'): reasoning", "101 ('add'): tools"
    for line in lines:
        assert f"{tmp_path}/rows.jsonl:{line} that the template does not write; skipped" in caplog.text


# Template, messages, tools, what is lost. The words "a", "5" and "add" stand in other places of every text too.
PIECES = [
    ("xml", [*turns("a"), called("add", "add"), *RESULT], TOOLS, ""),
    ("llama3 marked", [*turns("a"), called("add"), *RESULT], TOOLS, ""),
    ("llama3 marked", [*turns("a"), called("add", "add"), *RESULT], TOOLS, "tool call"),
    ("llama3 marked", [*turns("a"), called("add", content="a"), *RESULT], TOOLS, "content"),
    ("mistral marked", [*turns("a"), called("add", "add"), *RESULT], TOOLS, ""),
    ("qwen3 marked", [*turns("a"), called("add", "add", content="a"), *RESULT], TOOLS, ""),
    ("gpt_oss marked", [*turns("a"), called("add", "add", thinking="a"), *RESULT], TOOLS, "tool call"),
    ("gpt_oss marked", [*turns("a"), called("add", thinking="a", reasoning="a"), *RESULT], TOOLS, ""),
    ("chatml marked", [*turns("a"), called("add"), *RESULT], None, "tool call"),
    ("chatml marked", turns("a", "a"), [], ""),
    ("chatml marked", turns("a", "a"), TOOLS, "tools"),
    ("gemma3 marked", turns([{"type": "text", "text": "a"}, {"type": "text", "text": "a"}], "a"), None, ""),
    ("gpt_oss marked", [*turns("a"), system("a"), *turns("a", "a")], None, "content"),
    ("first", [*turns("a"), {"role": "assistant", "content": "a", "reasoning": "a"}], None, "reasoning"),
    ("first", [*turns("a"), {"role": "assistant", "content": "a", "reasoning": " \n"}], None, ""),
    ("first", turns("a", "<think>\na\n</think>\n\na"), None, ""),
    ("qwen3 marked", turns("a", "<think>\na\n</think>\n\na"), None, ""),
    ("qwen3 marked", turns("a</think>a", "a", "a", "<think></think>a"), None, ""),
    ("qwen3 marked", turns("<tool_response>a</tool_response>", "a", "a </think> a", "a"), None, ""),
]


@pytest.mark.parametrize(("name", "messages", "tools", "expected"), PIECES)
def test_a_piece_is_lost_only_if_no_other_would_change_the_text(
    name: str, messages: Any, tools: Any, expected: str
) -> None:
    assert lost(TEMPLATES[name], messages, tools) == expected


def call_in_forms(name: str, arguments: Any) -> list[dict[str, Any]]:
    """The assistant calls a function, in each form that is in use."""
    function = {"name": name, "arguments": arguments}
    nested = {"type": "function", "function": function, "id": f"functions.{name}:0"}
    calls: list[dict[str, Any]] = [{"tool_calls": [nested]}, {"tool_calls": [function]}, {"function_call": function}]
    return [{"role": "assistant", "content": None, **each} for each in calls]


@pytest.mark.parametrize("arguments", [{"a": 2}, {}, '{"a": 2}', {"a": {"b": [None, True]}}, {"a": None}])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ nested.name }}({{ nested.arguments }})", [True, False, False]),
        ("{{ c.name }}({{ (c.arguments or '') | tojson }})", [False, True, False]),
        ("{{ c.id }}({{ nested.arguments }})", [True, False, False]),  # as Kimi K2's
        ("{{ nested.name }}{% for k, v in nested.arguments.items() %}{{ k ~ v }}{% endfor %}", [True, False, False]),
        ("{{ (c.function or c).name }}", None),
    ],
    ids=["nested", "flat", "id", "items", "name"],
)
def test_calls_of_every_form_are_looked_for(written: str, expected: list[bool] | None, arguments: Any) -> None:
    source = "{% for m in messages %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    source += "{% set nested = c.function or {'arguments': {}} %}" + written + "{% endfor %}{% endfor %}"
    if "items" in written and isinstance(arguments, str):
        source = source.replace("nested.arguments.items()", "[(nested.arguments, '')]")
    found = [lost(source, [*turns("a"), each], loss_on="all") == "" for each in call_in_forms("add", arguments)]
    says_nothing = arguments in ({}, {"a": None})
    if "tojson" in written and isinstance(arguments, str):  # all are refused, this form as it is quoted
        expected = [False, False, False]
    assert found == (expected or [says_nothing, says_nothing, False])


@pytest.mark.parametrize("arguments", ['{"a": "\u00e9"}', "{}", {"a": "\u00e9"}, '["a"]', "a"])
@pytest.mark.parametrize("written", ["{{ c | tojson }}", "{{ f.name }} {{ f.arguments | tojson(ensure_ascii=true) }}"])
def test_arguments_that_are_the_json_of_an_object_are_not_learned_as_a_quoted_text(
    written: str, arguments: Any
) -> None:
    """As Llama 3.1's and Qwen2.5's templates would write the arguments of OpenAI's messages."""
    source = "{% for m in messages %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    source += "{% set f = c.function %}WRITTEN{% endfor %}{% endfor %}"
    row = {"messages": [*turns(f"""x = "{{}}" and {json.dumps(arguments)}"""), *call_in_forms("add", arguments)[:1]]}

    def outcome(written: str) -> str:
        return result_of(row, ChatTemplate(source.replace("WRITTEN", written), {}), loss_on="all")[0]

    quoted = arguments in ('{"a": "\u00e9"}', "{}")
    refused = "arguments of a call that the template writes as a quoted text"
    assert outcome(written) == (refused if quoted else "written")
    assert outcome("{{ f.name }} {{ f.arguments }}") == "written"


def test_a_thought_is_lost_where_its_turn_is_learned_or_no_turn_would_have_it() -> None:
    qwen3, name = marked("qwen3"), "reasoning_content"
    first, second = turns("a", "b"), turns("c", "d")
    for thought, at in (({name: "t"}, first), ({"content": "<think>t</think>b"}, first)):
        earlier = [at[0], {**at[1], **thought}]
        assert lost(qwen3, earlier) == ""
        assert lost(qwen3, [*earlier, *second]) == "reasoning"
        assert lost(qwen3, [*earlier, *second], loss_on="last_assistant") == ""
        assert lost(qwen3, [earlier[0], {**earlier[1], "weight": 0}, *second]) == ""
        assert lost(qwen3, [*earlier, *second], loss_on="all") == "reasoning"
    earlier = [first[0], {**first[1], name: "t"}]
    assert lost(FIRST_LLAMA3, [*earlier, *second], loss_on="last_assistant") == "reasoning"
    kind, _, _ = result_of({"messages": [*earlier, *second]}, ChatTemplate(qwen3, VARIABLES))
    assert kind == "reasoning that the template leaves out of earlier turns"


def test_a_template_that_refuses_another_piece_reads_it() -> None:
    source = "{% for m in messages %}{{ m.role }}{% if m.content not in ('yes', 'no') %}{{ raise_exception('which?') }}"
    source += "{% endif %}{{ 'Y' if m.content == 'yes' else 'N' }}{% endfor %}"
    assert lost(source, turns("yes", "no"), loss_on="all") == ""
