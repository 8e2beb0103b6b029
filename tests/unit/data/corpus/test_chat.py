"""Chat templates: token ids and masks as transformers makes them, turns found by prefixes, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.chats import (
    FAMILIES,
    TOOLS,
    VARIABLES,
    call,
    marked,
    plain,
    system,
    turns,
    write_tokenizer,
)
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.chat import ChatTemplate, find_chat_template
from torchtitan_cp.data.corpus.encoding import learned_tokens
from torchtitan_cp.data.corpus.huggingface_tokenizer import HuggingFaceTokenizer
from torchtitan_cp.data.corpus.records import BadRecordError
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer
from torchtitan_cp.data.errors import DataError

TOOL_ROW = [
    *turns("What is 2 + 3? ä"),
    call(a=2, b=3),
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]
ROWS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "one turn": (turns("Hello", "Hi there"), None),
    "system": ([system("Be brief."), *turns("Hello", "Hi")], None),
    "many turns": ([system("Be brief."), *turns("one", "two", "three", "four", "five", "six")], None),
    "unicode": (turns("漢字 \U0001f468\u200d\U0001f469 é", "\U0001f600 ça\u2028va \ufeff\n\n漢"), None),
    "empty": (turns("", "", "again", ""), None),
    "spaces": (turns("  a  \n", "\n\n  b  "), None),
    "no answer": (turns("Hello", "Hi", "and"), None),
    "tool": (TOOL_ROW, TOOLS),
    "thoughts": (
        [
            *turns("a", "b", "c"),
            {"role": "assistant", "content": "d", "reasoning_content": "so\nit is", "thinking": "so\nit is"},
        ],
        None,
    ),
}
CASES = [
    pytest.param(family, row, id=f"{family} {row}")
    for family in FAMILIES
    for row in ROWS
    if (family, row) != ("gemma3", "tool")  # it has no tools
    and (family, row) != ("chatml", "tool")
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), **VARIABLES)


@pytest.fixture(scope="module")
def encode(path: Path) -> Callable[..., tuple[list[int], list[int]]]:
    """Our token ids and masks of messages."""
    tokenizer = HuggingFaceTokenizer(path)

    def encode(
        source: str, messages: Any, tools: Any = None, loss_on: str = "assistant"
    ) -> tuple[list[int], list[int]]:
        text, learned = ChatTemplate(source, VARIABLES).render_with_mask(messages, tools, loss_on)
        [(ids, starts)] = tokenizer.encode_chat_batch([text])
        return ids.tolist(), learned_tokens(starts, learned).astype(int).tolist()

    return encode


def of_transformers(theirs: Any, source: str, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
    found = theirs.apply_chat_template(
        messages, tools=tools, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize(("family", "row"), CASES)
def test_ids_and_masks_equal_those_of_transformers(family: str, row: str, theirs: Any, encode: Any) -> None:
    messages, tools = ROWS[row]
    expected = of_transformers(theirs, marked(family), messages, tools)
    assert encode(marked(family), messages, tools) == expected
    assert any(expected[1])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([family for family in FAMILIES if family != "qwen3"]), st.lists(st.text(max_size=12), min_size=2)
)
def test_ids_and_masks_of_drawn_texts_equal_those_of_transformers(
    theirs: Any, encode: Any, family: str, contents: list[str]
) -> None:
    messages = turns(*contents)
    assert encode(marked(family), messages) == of_transformers(theirs, marked(family), messages)


# What a template without marks learns, in brackets: from the generation prompt to the end of the message's text.
WITHOUT_MARKS = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nä<|im_end|>\n<|im_start|>assistant\n⟦é<|im_end|>\n⟧"
    "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>\n⟧",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "ä<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦é<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>"
    "\n\nc<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦<|eot_id|>⟧",
    "mistral": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]ä[/INST]⟦é</s>⟧[INST]c[/INST]⟦</s>⟧",
    "gemma3": "<s><start_of_turn>user\nS\n\nä<end_of_turn>\n<start_of_turn>model\n⟦é<end_of_turn>\n⟧<start_of_turn>"
    "user\nc<end_of_turn>\n<start_of_turn>model\n⟦<end_of_turn>\n⟧",
}


def expected_of(brackets: str, theirs: Any) -> tuple[list[int], list[int]]:
    """Ids of the text without its brackets, and for each token whether it holds a character between them."""
    text, learned = "", np.zeros(0, bool)
    for index, part in enumerate(brackets.replace("⟧", "⟦").split("⟦")):
        text, learned = text + part, np.append(learned, np.full(len(part), index % 2 == 1))
    found = theirs(text, return_offsets_mapping=True)
    return found["input_ids"], [int(learned[start:stop].any()) for start, stop in found["offset_mapping"]]


@pytest.mark.parametrize("family", WITHOUT_MARKS)
def test_without_marks_turns_are_found_by_rendering_prefixes(family: str, theirs: Any, encode: Any) -> None:
    messages = [system("S"), *turns("ä", "é", "c", "")]
    assert encode(plain(family), messages) == expected_of(WITHOUT_MARKS[family], theirs)
    assert encode(plain(family), messages)[0] == of_transformers(theirs, plain(family), messages)[0]


@pytest.mark.parametrize(
    ("family", "turn"),
    [
        ("qwen3", "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nd<|im_end|>\n⟧"),
        ("gpt_oss", "<|start|>assistant⟦<|channel|>final<|message|>d<|return|>⟧"),
    ],
)
def test_a_template_that_writes_a_turn_otherwise_in_the_middle_is_refused_but_for_the_last_turn(
    family: str, turn: str, theirs: Any, encode: Any
) -> None:
    messages = turns("a", "b", "c", "d")
    with pytest.raises(DataError) as caught:
        encode(plain(family), messages)
    assert "the chat template changes message 2 (assistant) when others follow it" in str(caught.value)
    assert "fix: put {% generation %} and {% endgeneration %} around the assistant's text" in str(caught.value)
    assert str(caught.value).endswith("; or set loss_on = 'last_assistant'")
    with pytest.raises(DataError, match=r"give it as chat_template$"):
        encode(plain(family), [*messages, *turns("e")], loss_on="last_assistant")
    ids, mask = encode(plain(family), messages, loss_on="last_assistant")
    expected_ids, expected = expected_of(turn, theirs)
    assert (ids[-len(expected) :], mask[-len(expected) :]) == (expected_ids, expected)
    assert not any(mask[: -len(expected)])
    assert sum(encode(plain(family), messages[2:])[1]) == sum(expected)
    messages[3]["weight"] = 0
    for source, loss_on in ((plain(family), "all"), (marked(family) + marked(family), "assistant")):
        with pytest.raises(DataError, match=f"fix: remove weight and train from messages, with loss_on = '{loss_on}'"):
            encode(source, messages, loss_on=loss_on)


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant"])
def test_a_generation_prompt_that_is_not_how_a_turn_begins_is_named(loss_on: str) -> None:
    """As those of DeepSeek-R1 and Nemotron 3, which open a thought that the template does not write into a turn."""
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    with pytest.raises(DataError) as caught:
        learned(source, turns("a", "b"), loss_on)
    assert "begins message 2 (assistant) otherwise than its generation prompt, which ends in '<user>a<" in str(
        caught.value
    )
    assert str(caught.value).endswith("and give it as chat_template")
    assert learned(source, turns("a", "b"), "all") == ["<user>a<assistant>b"]


def test_a_message_that_changes_before_an_answer_is_the_one_that_is_named() -> None:
    """As in Mistral v3's, which writes the system's message only while the user's turn is the last."""
    source = "{% for m in messages %}{{ 'Be kind. ' if loop.last and m.role == 'user' else '' }}<{{ m.content }}>"
    with pytest.raises(DataError, match=r"changes message 1 \(user\) when others follow it"):
        learned(source + "{% endfor %}", turns("a", "b"))


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3"])
def test_an_answer_that_begins_a_conversation_is_learned_without_its_header(family: str) -> None:
    first, after = (learned(plain(family), messages) for messages in (turns("a", "b", "c")[1:], turns("a", "b")))
    assert first == [text.removeprefix("<think>\n\n</think>\n\n") for text in after]


THOUGHT = "{% if m.thinking %}{% generation %}{{ m.thinking }}|{% endgeneration %}{% endif %}"


def test_marks_are_not_those_of_other_answers_if_an_answer_has_none() -> None:
    source = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<a>{% elif not loop.first %}" + THOUGHT
    source += "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    messages = turns("a", "b", "c", "d")[1:]  # the template skips an answer that comes first
    messages[2] |= {"thinking": "t", "weight": 0}
    assert learned(source, messages) == []
    messages[0]["weight"], messages[2]["weight"] = 0, 1
    assert learned(source, messages) == ["t|", "d"]


@pytest.mark.parametrize(("end", "expected"), [("", ["b", "t|", "d"]), ("</a>", None)])
def test_answers_in_one_mark_are_told_apart_or_refused(end: str, expected: list[str] | None) -> None:
    source = "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<a>"
    source += "{% elif loop.previtem.role == 'user' %}" + THOUGHT + "{% generation %}{{ m.content }}"
    source += "{% if loop.nextitem and loop.nextitem.role == 'assistant' %}{{ loop.nextitem.content }}{% endif %}"
    source += end + "{% endgeneration %}{% endif %}{% endfor %}"
    messages = [*turns("a", "b"), {"role": "assistant", "content": "c", "weight": 0}, *turns("e", "d")]
    messages[4]["thinking"] = "t"
    if expected:
        assert learned(source, messages) == expected
    else:
        with pytest.raises(DataError, match=r"message 2 \(assistant\) when others follow it"):
            learned(source, messages)


def learned(source: str, messages: Any, loss_on: str = "assistant", tools: Any = None) -> list[str]:
    text, ranges = ChatTemplate(source, VARIABLES).render_with_mask(messages, tools, loss_on)
    return [text[start:stop] for start, stop in ranges]


@pytest.mark.parametrize("source", [marked("mistral"), plain("mistral")], ids=["marked", "plain"])
def test_loss_on_and_keys_of_messages_choose_turns(source: str) -> None:
    messages = turns("a", "b", "c", "d", "e", "f")
    assert learned(source, messages) == ["b</s>", "d</s>", "f</s>"]
    assert learned(source, messages, "last_assistant") == ["f</s>"]
    assert "".join(learned(source, messages, "all")) == "<s>[INST]a[/INST]b</s>[INST]c[/INST]d</s>[INST]e[/INST]f</s>"
    messages[1]["weight"], messages[3]["train"], messages[5]["weight"] = 0, False, 1.0
    assert learned(source, messages) == ["f</s>"]
    messages[5]["weight"], messages[3]["train"] = 0, True
    assert learned(source, messages) == ["d</s>"]
    assert learned(source, messages, "last_assistant") == []
    assert learned(source, messages, "all") == ["<s>[INST]a[/INST]", "[INST]c[/INST]", "d</s>", "[INST]e[/INST]"]


def test_several_marks_of_one_message_belong_to_it() -> None:
    messages = turns("a", "b", "c", "d")
    messages[3]["thinking"] = "t"
    last = ["<|channel|>analysis<|message|>t<|end|>", "<|channel|>final<|message|>d<|return|>"]
    assert learned(marked("gpt_oss"), messages) == ["<|channel|>final<|message|>b<|end|>", *last]
    assert learned(marked("gpt_oss"), messages, "last_assistant") == last


ROLE = "<|{{ m.role }}|>"
GENERATED = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"


@pytest.mark.parametrize(
    ("turn", "teaches"),
    [
        (ROLE + "{{ m.content }}", False),  # the next turn's role ends an answer
        (ROLE + "{{ m.content }}\n", False),
        (ROLE + GENERATED + "{% endif %}</s>", False),  # behind the mark
        ("{% generation %}" + ROLE + "{{ m.content }}{% endgeneration %}", True),
        (ROLE + "{{ m.content }}</s>", True),
        (ROLE + GENERATED.replace("{% endg", "{% if loop.last %}</s>{% endif %}{% endg") + "{% endif %}", True),
        (None, True),
    ],
)
def test_whether_a_template_teaches_to_end_an_answer(turn: str | None, teaches: bool) -> None:
    sources = [f"{{% for m in messages %}}{turn}{{% endfor %}}"] if turn else [*map(marked, FAMILIES)]
    sources += [] if turn else [*map(plain, FAMILIES), "{% if %}"]
    for source in sources:
        template = ChatTemplate(
            source + "{% if add_generation_prompt %}<|assistant|>{% endif %}" * bool(turn), VARIABLES
        )
        assert [template.teaches_to_end(loss_on) for loss_on in ("assistant", "all")] == [teaches, True], source


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "all"])
@pytest.mark.parametrize(
    ("default", "tool_use"),
    [
        (marked("qwen3"), marked("llama3")),
        (marked("qwen3"), plain("llama3")),
        (plain("chatml"), marked("mistral")),
        (plain("llama3"), plain("mistral")),
    ],
    ids=["marked", "default marked", "tool_use marked", "plain"],
)
def test_what_is_learned_follows_from_the_template_that_the_tools_choose(
    default: str, tool_use: str, loss_on: str
) -> None:
    template = ChatTemplate(default, VARIABLES, {"tool_use": tool_use, "rag": "{% if %}"})
    weighted = [*TOOL_ROW[:2], {**TOOL_ROW[2], "weight": 0}, *TOOL_ROW[3:]]
    for messages in (TOOL_ROW, weighted):
        alone = ChatTemplate(tool_use, VARIABLES).render_with_mask(messages, TOOLS, loss_on)
        assert template.render_with_mask(messages, TOOLS, loss_on) == alone
        assert alone[1]
    for tools in (None, []):
        alone = ChatTemplate(default if tools is None else tool_use, VARIABLES).render_with_mask(turns("a", "b"), tools)
        assert template.render_with_mask(turns("a", "b"), tools) == alone


def test_the_template_that_has_a_fault_is_named(tmp_path: Path) -> None:
    mute = (
        "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    )
    for named, teaches in (({"tool_use": mute}, False), ({"tool_use": plain("qwen3"), "rag": mute}, True)):
        assert ChatTemplate(plain("chatml"), VARIABLES, named).teaches_to_end("assistant") is teaches
    changes = ChatTemplate(plain("chatml"), VARIABLES, {"tool_use": plain("qwen3")})
    with pytest.raises(DataError, match=r"the chat template tool_use changes message 2 \(assistant\)") as caught:
        changes.render_with_mask(turns("a", "b", "c", "d"), TOOLS)
    assert "beside the tokenizer as additional_chat_templates/tool_use.jinja; or set loss_on" in str(caught.value)
    no_default = ChatTemplate("", VARIABLES, {"tool_use": plain("qwen3")})
    with pytest.raises(BadRecordError, match=r"'no chat template named default', 'there are: tool_use'"):
        no_default.render(turns("a"))
    assert no_default.render(turns("a"), TOOLS)

    data = Data(source="jsonl", messages_field="messages")
    stored = {"default": plain("chatml"), "../up": plain("chatml"), "tool_use": "{% if %}", "rag": "{% for %}"}
    path = write_tokenizer(tmp_path, chat_template=[{"name": n, "template": t} for n, t in stored.items()])
    with pytest.raises(DataError, match=r"the chat template is not valid Jinja"):
        find_chat_template(data, TokenizerConfig("huggingface", str(path)), None)
    stored["tool_use"] = plain("qwen3")
    path = write_tokenizer(tmp_path, chat_template=stored)
    found = find_chat_template(data, TokenizerConfig("huggingface", str(path)), None)
    assert found
    assert sorted(found.named) == ["rag", "tool_use"], "a name with a slash cannot be the name of a file"


def test_a_template_that_refuses_messages_says_why() -> None:
    with pytest.raises(BadRecordError, match="user and assistant must take turns"):
        ChatTemplate(plain("mistral"), VARIABLES).render([*turns("a"), *turns("b")])
    with pytest.raises(BadRecordError, match="SecurityError"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(turns("a"))
    with pytest.raises(BadRecordError, match="TemplateSyntaxError"):
        ChatTemplate("{% if %}").render(turns("a"))


def test_the_date_in_a_template_is_the_same_on_every_day_and_machine() -> None:
    source = "{{ strftime_now('%d %b %Y') if strftime_now is defined }}{{ strftime_now('|%Y-%m-%d %H:%M') }}"
    for text in (source, source + "{% generation %}{% endgeneration %}"):
        assert ChatTemplate(text).render_with_mask(turns("a", "b"), loss_on="all")[0] == "26 Jul 2024|2024-07-26 00:00"


def test_special_tokens_of_the_bytes_are_read_and_characters_counted() -> None:
    [(ids, starts)] = ByteTokenizer().encode_chat_batch(["é</s>a"])
    assert (ids.tolist(), starts.tolist()) == ([0xC3, 0xA9, 256, 97], [0, 0, 1, 5])


def test_a_template_is_found_in_the_config_the_tokenizers_files_or_the_checkpoint(tmp_path: Path) -> None:
    data = Data(source="jsonl", messages_field="messages")

    def find(chat_template: str = "", path: str = "", hub: Path | None = None) -> ChatTemplate:
        changed = Data(source="jsonl", messages_field="messages", chat_template=chat_template)
        found = find_chat_template(changed, TokenizerConfig("huggingface" if path else "bytes", path), hub)
        assert found
        return found

    named = [{"name": "tool_use", "template": "of tools"}, {"name": "default", "template": "of config"}]
    path = write_tokenizer(tmp_path / "own", chat_template=named, bos_token={"content": "<b>"}, add_bos_token=True)
    variables = {"bos_token": "<b>", "eos_token": "</s>"}
    assert find(path=str(path)) == ChatTemplate("of config", variables, {"tool_use": "of tools"})
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "chat_template.jinja").write_text("of hub")
    assert find(path=str(path), hub=hub).source == "of config"
    (path.parent / "chat_template.jinja").write_text("of file", encoding="utf-8-sig")  # a byte order mark is no text
    assert find(path=str(path)).source == "of file"
    assert find(hub=path.parent) == ChatTemplate("of file", {"bos_token": "<b>", "eos_token": "</s>"})
    (tmp_path / "mine.jinja").write_text("mine", encoding="utf-8-sig")
    assert find(str(tmp_path / "mine.jinja"), str(path)).source == "mine"
    (path.parent / "tokenizer_config.json").unlink()
    assert find(path=str(path)).variables == {"eos_token": "</s>"}
    with pytest.raises(DataError) as caught:
        find_chat_template(data, TokenizerConfig("bytes"), None)
    assert "data holds conversations, and there is no chat template" in str(caught.value)
    assert "fix: set data.chat_template to a file with a Jinja template, or put chat_template.jinja or" in str(
        caught.value
    )
    for chat_template in ({"default": {}}, ["no names"], [{"name": "default"}], [{"template": "no name"}], 5):
        path = write_tokenizer(tmp_path / "odd", chat_template=chat_template, bos_token={"id": 1})
        with pytest.raises(DataError, match="data holds conversations, and there is no chat template"):
            find(path=str(path))
        assert find(str(tmp_path / "mine.jinja"), str(path)).variables == {"eos_token": "</s>"}
    with pytest.raises(DataError, match=r"the chat template cannot be read: .*nowhere"):
        find(str(tmp_path / "nowhere"))
