"""Conversations as text: a chat template writes them, and says which characters are learned."""

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_cp.config.data import SourceKeys
from torchtitan_cp.config.json_types import Json
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.records import BadRecordError, parse_json
from torchtitan_cp.data.corpus.rendering import GENERATION_MARK, Messages, Ranges, render_template
from torchtitan_cp.data.corpus.roles import FIELDS_BESIDE_MESSAGES, ROLES, known_roles, with_known_role, with_system
from torchtitan_cp.data.corpus.store import read_json
from torchtitan_cp.data.corpus.tokenizer import template_variables
from torchtitan_cp.data.corpus.unwritten import check_form, check_is_written
from torchtitan_cp.data.errors import DataError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
TEMPLATE_FOLDER = "additional_chat_templates"  # files named for their templates
DEFAULT, TOOL_USE = "default", "tool_use"  # names of the templates for conversations without tools and with some
SAMPLE_TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "f", "description": "?", "parameters": {"type": "object"}}}
]
MAX_CHARACTERS = 10_000_000  # in a conversation, which is tokenized in one piece


@dataclass(frozen=True)
class ChatTemplate:
    """How a model's conversations are written: by one template, or by several with names, as in transformers.

    They run as there, in jinja2's sandbox.

    Attributes:
        source: Jinja text of the template named `default`; empty if there is none.
        variables: what it reads beside the messages: bos_token, eos_token and others.
        named: Jinja text of the others, by name. `tool_use` writes the conversations that have tools.
    """

    source: str
    variables: dict[str, str] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)

    def _choose(self, tools: Json) -> tuple[str, str]:
        """Name and text of the template for a conversation with these tools.

        Raises:
            BadRecordError: there is none.
        """
        name = TOOL_USE if tools is not None and TOOL_USE in self.named else DEFAULT
        source = self.named.get(name, self.source)
        if not source:
            raise BadRecordError("no chat template named default", f"there are: {', '.join(self.named)}")
        return name, source

    def save(self, folder: Path) -> None:
        """Write the templates to a tokenizer's folder as transformers does, in place of those that are there."""
        shutil.rmtree(folder / TEMPLATE_FOLDER, ignore_errors=True)
        (folder / TEMPLATE_FILE).unlink(missing_ok=True)
        for name, text in {DEFAULT: self.source, **self.named}.items():
            path = folder / (TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{name}.jinja")
            if text:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")

    def render(self, messages: Messages, tools: Json = None, *, add_generation_prompt: bool = False) -> str:
        """The text of messages.

        Args:
            tools: that the assistant may call, a list of JSON schemas; None: the row has no such list.
            add_generation_prompt: the text ends where the assistant's turn begins.

        Raises:
            BadRecordError: the template refuses or cannot write them.
            DataError: the template is not valid Jinja.
        """
        return self._render(messages, tools, prompt=add_generation_prompt)[0]

    def _render(
        self, messages: Messages, tools: Json, *, marks: bool = False, prompt: bool = False
    ) -> tuple[str, Ranges]:
        source = self._choose(tools)[1]
        return render_template(source, messages, tools, self.variables, marks=marks, prompt=prompt)

    def render_with_mask(
        self, messages: Messages, tools: Json = None, loss_on: str = "assistant"
    ) -> tuple[str, Ranges]:
        """The text of messages and what of it is learned.

        The template's `{% generation %}` marks say what an answer is. Without them a message reaches from the end of
        the messages before it, with the generation prompt, to the end of the messages with it.

        Args:
            messages: checked; one with `weight` 0 or `train` false is not learned. Null is as no key.
            loss_on: `assistant`, `last_assistant` or `all`.

        Raises:
            BadRecordError: as render.
            DataError: as _find_message.
        """
        name, source = self._choose(tools)
        marked = GENERATION_MARK.search(source) is not None
        text, marks = self._render(messages, tools, marks=marked)
        answers, learned = _answers(messages), learned_messages(messages, loss_on)
        fix = f"remove weight and train from messages, with loss_on = '{'assistant' if marked else 'all'}'"
        if not marked and loss_on != "all":
            fix = "put {% generation %} and {% endgeneration %} around the assistant's text in a copy of the template, "
            file = TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{name}.jinja"
            with_others = f"put it, with files of the other templates, beside the tokenizer as {file}"
            fix += f"and {with_others if self.named else 'give it as chat_template'}"
        if loss_on == "all" and len(learned) == len(messages):
            ranges = [(0, len(text))]
        elif loss_on == "all" or not marked:
            ranges = [self._find_message(text, messages, index, tools, loss_on != "all", fix) for index in learned]
        elif learned == answers:
            ranges = marks
        elif self._has_one_mark_each(messages, answers, tools, len(marks)):
            ranges = [mark for index, mark in zip(answers, marks, strict=True) if index in learned]
        else:  # a message has several marks, or shares one: those within it are its own
            spans = [self._find_message(text, messages, index, tools, False, fix) for index in learned]
            ranges = [(max(start, first), min(stop, last)) for start, stop in spans for first, last in marks]
        return text, [(start, stop) for start, stop in ranges if start < stop]

    def _has_one_mark_each(self, messages: Messages, answers: list[int], tools: Json, marks: int) -> bool:
        """Whether each answer adds one of the text's marks."""
        found = [len(self._render(messages[: index + 1], tools, marks=True)[1]) for index in answers]
        return found == list(range(1, marks + 1))

    def _find_message(
        self, text: str, messages: Messages, index: int, tools: Json, after_prompt: bool, fix: str
    ) -> tuple[int, int]:
        """Where message `index` lies in the text of all messages, as (start, stop).

        Args:
            after_prompt: it begins after the generation prompt.
            fix: what the user may do if it is not found.

        Raises:
            DataError: the template changes a message when others follow it, or begins this one differently than its
                generation prompt.
        """
        before = self.render(messages[:index], tools, add_generation_prompt=after_prompt) if index else ""
        through = self.render(messages[: index + 1], tools) if index + 1 < len(messages) else text
        if after_prompt and not index:  # many templates refuse to write no message: the prompt is that of another turn
            prompt = self.render(messages[:1], tools, add_generation_prompt=True).removeprefix(through)
            before = through.partition(prompt)[0] + prompt if prompt else ""
        if text.startswith(through) and through.startswith(before):
            return len(before), len(through)
        ends, earlier = text.startswith(through), self.render(messages[:index], tools) if index else ""
        begins = through.startswith(earlier)
        number = index + (begins or not ends)
        message = f"message {number} ({messages[number - 1]['role']})"
        problem = f"changes {message} when others follow it"
        if ends and begins:
            problem = f"begins {message} otherwise than its generation prompt, which ends in {before[-30:]!r}"
        elif after_prompt and any(later["role"] == "assistant" for later in messages[index + 1 :]):
            fix += "; or set loss_on = 'last_assistant'"
        name = f" {self._choose(tools)[0]}" * bool(self.named)
        raise DataError(f"the chat template{name} {problem}, so what is learned cannot be found in the text", fix=fix)

    def teaches_to_end(self, loss_on: str) -> bool:
        """Whether something after the text of an answer is learned too, as the token that ends a turn should be.

        It holds without tools and with some. A template that writes neither of the two conversations that it is tried
        on does not count.
        """
        answer = "ANSWERPLACE"
        for tools in (None, SAMPLE_TOOLS):
            found = list[bool]()
            for turns in (("user", "assistant", "user"), ("user", "assistant")):
                messages = [{"role": role, "content": answer if role == "assistant" else role} for role in turns]
                with suppress(BadRecordError, DataError):
                    text, ranges = self.render_with_mask(messages, tools, loss_on)
                    end = text.find(answer) + len(answer)
                    found.append(any(text[max(start, end) : stop].strip() for start, stop in ranges))
            if found and not any(found):
                return False
        return True


def _answers(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def learned_messages(messages: Messages, loss_on: str) -> list[int]:
    """Indices of the messages that are learned, by loss_on and by their `weight` and `train`."""
    answers = _answers(messages)
    chosen = {"assistant": answers, "last_assistant": answers[-1:], "all": range(len(messages))}[loss_on]
    return [i for i in chosen if messages[i].get("weight") != 0 and messages[i].get("train") is not False]


def conversation_fields(source: SourceKeys) -> set[str]:
    """The fields of a row that `read_conversation` reads."""
    return {source.messages_field or "messages", source.prompt_field, source.completion_field, *FIELDS_BESIDE_MESSAGES}


def read_conversation(row: Mapping[str, object], source: SourceKeys, template: ChatTemplate) -> tuple[str, Ranges]:
    """The conversation in a row of the corpus as text, and what of it is learned.

    Raises:
        BadRecordError, DataError: as render_with_mask; or the row holds none.
    """
    row = row if source.source == "jsonl" else _fields_without_none(row)
    found = row.get(source.messages_field or "messages")
    if source.prompt_field:
        found = list[object]()
        for role, field_name in (("user", source.prompt_field), ("assistant", source.completion_field)):
            content = row.get(field_name)
            found += content if isinstance(content, list) else [{"role": role, "content": content}]
    messages = check_messages(with_system(found, row.get("system")))
    tools = _read_tools(row.get("tools"))
    text, learned = template.render_with_mask(messages, tools, source.loss_on)
    if re.search("[\ud800-\udfff]", text):
        raise BadRecordError("a lone surrogate")
    check_form(messages, tools, text, template.render)
    check_is_written(messages, tools, learned_messages(messages, source.loss_on), template.render)
    if not learned:
        raise BadRecordError("nothing to learn")
    return text, learned


def _read_tools(tools: object) -> list[Json] | None:
    """The tools of a row: a list, or its JSON. None, an empty text and null say nothing; an empty list is one."""
    tools = parse_json(tools or "null", "tools that are not JSON") if isinstance(tools, str) else tools
    if not isinstance(tools or [], list):
        raise BadRecordError("tools that are not a list", f"{tools!r:.80}")
    return tools if isinstance(tools, list) else None


def without_none(value: object) -> object:
    """A nested value without the fields that Arrow adds to a row because other rows have them."""
    if isinstance(value, dict):
        return _fields_without_none(value)
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def _fields_without_none(row: Mapping[str, object]) -> dict[str, object]:
    return {name: without_none(entry) for name, entry in row.items() if entry is not None}


def check_messages(messages: object) -> list[dict[str, Json]]:
    """The messages of a conversation, as {role, content}, once their roles, contents and weights are checked.

    Raises:
        BadRecordError: the first that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRecordError("no messages", f"{messages!r:.80}")
    known: list[Any] = [with_known_role(message) for message in messages]
    for number, message in enumerate(known, start=1):
        problem, hint = "", ""
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            has_role = isinstance(message, dict) and "role" in message
            problem = "unknown role" if has_role else "message without a role"
            hint = f"; {known_roles()}"
        elif not _is_content(message):
            problem = "content of a wrong type"
        elif message.get("weight") not in (None, 0, 1) or not isinstance(message.get("train"), bool | None):
            problem = "weight that is neither 0 nor 1"
        if problem:
            raise BadRecordError(problem, f"message {number}: {message!r:.80}{hint}")
    characters = sum(len(text) for message in known for text in _texts(message))
    if characters >= MAX_CHARACTERS:
        raise BadRecordError("conversation of 10 MB or more", f"{characters} characters")
    return known


def _is_content(message: Mapping[str, Json]) -> bool:
    """Whether the message has a text, a list of parts with texts, or, of an assistant, a call instead."""
    content = message.get("content")
    if content is None:
        calls = message.keys() - {"role", "content", "weight", "train", "name"}
        return message["role"] == "assistant" and any(message[name] for name in calls)
    return len(_texts(message)) == (len(content) if isinstance(content, list) else 1)


def _texts(message: Mapping[str, Json]) -> list[str]:
    """The texts of a message: its content, or those of the content's parts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return [text for text in texts if isinstance(text, str)]


def find_chat_template(source: SourceKeys, tokenizer: TokenizerConfig, start: Path | None) -> ChatTemplate | None:
    """The chat templates of a source: `chat_template`, else of the tokenizer's files, else of the checkpoint's.

    Its variables are the special tokens that `template_variables` names.

    Args:
        start: folder of the checkpoint that training begins from, if there is one.

    Returns:
        None if there is none that can be read, and the source holds no conversations.

    Raises:
        DataError: the source holds conversations, and there is none, or it cannot be read.
    """
    tokenizer_folder = Path(os.path.expanduser(tokenizer.path)).parent if tokenizer.path else None
    folders = [folder for folder in (tokenizer_folder, start) if folder]
    configs = [read_json(folder / CONFIG_FILE) or {} for folder in folders]
    named = dict[str, str]()
    problem = "there is no chat template"
    try:
        if source.chat_template:
            named = _readable([(DEFAULT, Path(os.path.expanduser(source.chat_template)).read_text("utf-8-sig"))])
        for folder, config in zip(folders, configs, strict=True):
            named = named or _read_templates(folder, config)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"the chat template cannot be read: {error}"
    if not named:
        if not source.conversations:
            return None
        raise DataError(
            f"{source.where} holds conversations, and {problem}",
            fix=f"set {source.where}.chat_template to a file with a Jinja template, or put {TEMPLATE_FILE} or "
            f"{CONFIG_FILE} beside the tokenizer",
        )
    template = ChatTemplate(named.pop(DEFAULT, ""), template_variables(tokenizer, start), named)
    for tools in (None, SAMPLE_TOOLS):
        try:
            template.render([{"role": "user", "content": "?"}], tools)
        except BadRecordError as error:
            if source.conversations and "TemplateSyntaxError" in str(error):
                problem = f"the chat template is not valid Jinja: {error.args[-1]}"
                fix = f"correct it, or set {source.where}.chat_template to another file"
                raise DataError(problem, fix=fix) from None
    return template


def _read_templates(folder: Path, config: Mapping[str, Json]) -> dict[str, str]:
    """The templates of a tokenizer's folder by name, read as by transformers: its files, else those of its config."""
    files = {DEFAULT: folder / TEMPLATE_FILE}
    files |= {path.name.removesuffix(".jinja"): path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if written := _readable((name, path.read_text("utf-8-sig")) for name, path in files.items() if path.is_file()):
        return written
    stored = config.get("chat_template")
    if isinstance(stored, list):
        return _readable(
            {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}.items()
        )
    return _readable(stored.items() if isinstance(stored, dict) else [(DEFAULT, stored)])


def _readable(templates: Iterable[tuple[object, object]]) -> dict[str, str]:
    """The names and texts of those that are text and have a name that a file may have."""
    named = ((name, text) for name, text in templates if isinstance(name, str) and Path(name).name == name)
    return {name: text for name, text in named if text and isinstance(text, str)}
