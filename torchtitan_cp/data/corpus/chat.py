"""Conversations as text: a chat template writes them, and says which characters are learned."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.sections import SourceKeys
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.records import BadRecordError, parse_json
from torchtitan_cp.data.corpus.store import read_json
from torchtitan_cp.data.corpus.tokenizer import END_NAME, load_tokenizer
from torchtitan_cp.data.errors import DataError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
TODAY = datetime(2024, 7, 26)  # for every template, so that tokens depend on no day; the default of Llama 3.1's
MAX_CHARACTERS = 10_000_000  # in a conversation, which is tokenized in one piece

Messages = Sequence[Mapping[str, Any]]
Ranges = list[tuple[int, int]]  # (start, stop) of characters, in order and apart from each other


@dataclass(frozen=True)
class ChatTemplate:
    """How a model's conversations are written. It runs as in transformers, in jinja2's sandbox.

    Attributes:
        source: Jinja text.
        variables: what it reads beside the messages: bos_token, eos_token and others.
    """

    source: str
    variables: dict[str, str] = field(default_factory=dict)

    def render(self, messages: Messages, tools: Any = None, *, add_generation_prompt: bool = False) -> str:
        """The text of messages.

        Args:
            tools: that the assistant may call, a list of JSON schemas.
            add_generation_prompt: it ends where the assistant's turn begins.

        Raises:
            BadRecordError: the template refuses or cannot write them.
        """
        return self._render(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def _render(self, messages: Messages, tools: Any, **settings: Any) -> tuple[str, Ranges]:
        utils = import_extra("transformers.utils.chat_template_utils", extra="hub", needed_by="a chat template")
        settings |= {"chat_template": self.source, **self.variables}
        try:
            # The template that is rendered, from transformers' cache; it takes no function as a variable.
            utils._compile_jinja_template(self.source).globals["strftime_now"] = TODAY.strftime
            [text], marks = utils.render_jinja_template([list(messages)], tools=tools or None, **settings)
        except Exception as error:  # a template raises what its author made it
            raise BadRecordError("template error", f"{type(error).__name__}: {error}") from error
        return text, marks[0] if marks else []

    def render_with_mask(self, messages: Messages, tools: Any = None, loss_on: str = "assistant") -> tuple[str, Ranges]:
        """The text of messages and what of it is learned.

        A turn is found by the template's `{% generation %}` marks. Without them it reaches from the end of the
        messages before it, with the generation prompt, to the end of the messages with it.

        Args:
            messages: checked; a turn with `weight` 0 or `train` false is not learned. Null is as no key.
            loss_on: `assistant`, `last_assistant` or `all`.

        Raises:
            BadRecordError: as render.
            DataError: turns cannot be found, as the template changes a message when others follow it, or begins a turn
                otherwise than its generation prompt.
        """
        marked = GENERATION_MARK.search(self.source) is not None
        text, ranges = self._render(messages, tools, return_assistant_tokens_mask=marked)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns = {"assistant": answers, "last_assistant": answers[-1:], "all": range(len(messages))}[loss_on]
        learned = [i for i in turns if messages[i].get("weight") != 0 and messages[i].get("train") is not False]

        def span(index: int, prompts: bool) -> tuple[int, int]:
            before = self.render(messages[:index], tools, add_generation_prompt=prompts) if index else ""
            through = self.render(messages[: index + 1], tools) if index + 1 < len(messages) else text
            if prompts and not index:  # many templates refuse to write no message: the prompt is that of another turn
                prompt = self.render(messages[:1], tools, add_generation_prompt=True).removeprefix(through)
                before = through.partition(prompt)[0] + prompt if prompt else ""
            if text.startswith(through) and through.startswith(before):
                return len(before), len(through)
            ends, earlier = text.startswith(through), self.render(messages[:index], tools) if index else ""
            begins = through.startswith(earlier)
            number, other = index + (begins or not ends), ""
            message = f"message {number} ({messages[number - 1]['role']})"
            problem = f"changes {message} when others follow it"
            if ends and begins:
                problem = f"begins {message} otherwise than its generation prompt, which ends in {before[-30:]!r}"
            elif index in answers[:-1]:
                other = "; or set loss_on = 'last_assistant'"
            raise DataError(
                f"the chat template {problem}, so what is learned cannot be found in the text",
                fix=f"remove weight and train from messages, with loss_on = '{'assistant' if marked else 'all'}'"
                if marked or loss_on == "all"
                else "put {% generation %} and {% endgeneration %} around the assistant's text in a copy of the "
                f"template, and give it as chat_template{other}",
            )

        def marks_through(index: int) -> int:
            return len(self._render(messages[: index + 1], tools, return_assistant_tokens_mask=True)[1])

        if loss_on == "all" and len(learned) == len(messages):
            ranges = [(0, len(text))]
        elif loss_on == "all" or not marked:
            ranges = [span(index, loss_on != "all") for index in learned]
        elif learned != answers and [*map(marks_through, answers)] == [*range(1, len(ranges) + 1)]:
            ranges = [mark for index, mark in zip(answers, ranges, strict=True) if index in learned]
        elif learned != answers:  # a message may have several marks, or share one
            spans = [span(index, False) for index in learned]
            ranges = [(max(start, a), min(stop, b)) for start, stop in spans for a, b in ranges]
        return text, [(start, stop) for start, stop in ranges if start < stop]

    def teaches_to_end(self, loss_on: str) -> bool:
        """Whether something behind the text of an answer is learned too, as the token that ends a turn should be.

        A template that takes neither a last answer nor one before a question is given the benefit of the doubt.
        """
        answer, found = "ANSWERPLACE", list[bool]()
        for turns in (("user", "assistant", "user"), ("user", "assistant")):
            messages = [{"role": role, "content": answer if role == "assistant" else role} for role in turns]
            with suppress(BadRecordError, DataError):
                text, ranges = self.render_with_mask(messages, loss_on=loss_on)
                behind = text.find(answer) + len(answer)
                found.append(any(text[max(start, behind) : stop].strip() for start, stop in ranges))
        return any(found) or not found


def read_conversation(row: Any, source: SourceKeys, template: ChatTemplate) -> tuple[str, Ranges]:
    """The conversation in a row of the corpus as text, and what of it is learned.

    Raises:
        BadRecordError, DataError: as render_with_mask; or the row holds none.
    """
    row = row if source.source == "jsonl" else without_none(row)
    messages: Any = row.get(source.messages_field or "messages")
    if source.prompt_field:
        pair = (row.get(source.prompt_field), "user"), (row.get(source.completion_field), "assistant")
        messages = [m for x, role in pair for m in (x if isinstance(x, list) else [{"role": role, "content": x}])]
    check_messages(messages)
    text, learned = template.render_with_mask(messages, _read_tools(row.get("tools")), source.loss_on)
    if re.search("[\ud800-\udfff]", text):
        raise BadRecordError("a lone surrogate")
    for role in ("user", "assistant"):
        spoken = [m for m in messages if m["role"] == role and not (m.get("tool_calls") or m.get("function_call"))]
        # Behind a thought, which some templates leave out; they may also change the first word or the last.
        texts = [x for m in spoken if isinstance(x := m.get("content"), str)]
        behind = [words for x in texts if (words := x.rpartition(">")[2].split())]
        if behind and not any(words[0] in text or words[-1] in text for words in behind):
            raise BadRecordError("content that the template does not write", f"of the {role}: {behind[0][-1]!r:.80}")
    if not learned:
        raise BadRecordError("nothing to learn")
    return text, learned


def _read_tools(tools: Any) -> list[Any] | None:
    """The tools of a row: a list, or its JSON; None if there are none."""
    tools = parse_json(tools or "null", "tools that are not JSON") if isinstance(tools, str) else tools
    if not isinstance(tools or [], list):
        raise BadRecordError("tools that are not a list", f"{tools!r:.80}")
    return tools


def without_none(value: Any) -> Any:
    """A nested value without the fields that Arrow adds to a row because other rows have them."""
    if isinstance(value, dict):
        return {name: without_none(entry) for name, entry in value.items() if entry is not None or name == "content"}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def check_messages(messages: Any) -> None:
    """Check the messages of a conversation: their roles, contents and weights.

    Raises:
        BadRecordError: the first that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRecordError("no messages", f"{messages!r:.80}")
    characters = 0
    for number, message in enumerate(messages, start=1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else ("", None)
        problem, text = "", "" if content is None else content
        parts: list[Any] = text if isinstance(text, list) else [{"text": text}]
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        others = message.keys() - {"role", "content", "weight", "train", "name"} if role == "assistant" else ()
        if role not in ROLES:
            problem = "unknown role" if isinstance(message, dict) and "role" in message else "message without a role"
        elif len(texts) < len(parts) or (content is None and not any(message[name] for name in others)):
            problem = "content of a wrong type"
        elif message.get("weight") not in (None, 0, 1) or not isinstance(message.get("train"), bool | None):
            problem = "weight that is neither 0 nor 1"
        if problem:
            roles = f"; roles are {', '.join(ROLES)}" * ("role" in problem)
            raise BadRecordError(problem, f"message {number}: {message!r:.80}{roles}")
        characters += sum(map(len, texts))
    if characters >= MAX_CHARACTERS:
        raise BadRecordError("conversation of 10 MB or more", f"{characters} characters")


def find_chat_template(source: SourceKeys, tokenizer: TokenizerConfig, start: Path | None) -> ChatTemplate | None:
    """The chat template of a source: `chat_template`, else of the tokenizer's files, else of the checkpoint's.

    Its variables are the special tokens of tokenizer_config.json; without that file only eos_token is set.

    Args:
        start: folder of the checkpoint that training begins from, if there is one.

    Returns:
        None if there is none that can be read, and the source holds no conversations.

    Raises:
        DataError: the source holds conversations, and there is none, or it cannot be read.
    """
    own = Path(os.path.expanduser(tokenizer.path)).parent if tokenizer.path else None
    folders = [folder for folder in (own, start) if folder]
    configs = [read_json(folder / CONFIG_FILE) or {} for folder in folders]
    text: Any = None
    problem = "there is no chat template"
    try:
        if source.chat_template:
            text = Path(os.path.expanduser(source.chat_template)).read_text("utf-8")
        for folder, config in zip(folders, configs, strict=True):
            file = folder / TEMPLATE_FILE
            text = text or (file.read_text("utf-8") if file.exists() else config.get("chat_template"))
    except (OSError, UnicodeDecodeError) as error:
        problem = f"the chat template cannot be read: {error}"
    if isinstance(text, list):  # several templates with names
        default = (entry for entry in text if isinstance(entry, dict) and entry.get("name") == "default")
        text = next(default, {}).get("template")
    if not text or not isinstance(text, str):
        if not source.conversations:
            return None
        raise DataError(
            f"{source.where} holds conversations, and {problem}",
            fix=f"set {source.where}.chat_template to a file with a Jinja template, or put {TEMPLATE_FILE} or "
            f"{CONFIG_FILE} beside the tokenizer",
        )
    known = next(filter(None, configs), {}).items()
    tokens = {name: x.get("content") if isinstance(x, dict) else x for name, x in known if "_token" in name}
    if not tokens.get("eos_token"):
        tokens["eos_token"] = load_tokenizer(tokenizer).eos_token if tokenizer.path else END_NAME
    template = ChatTemplate(text, {name: token for name, token in tokens.items() if isinstance(token, str)})
    try:
        template.render([{"role": "user", "content": "?"}])
    except BadRecordError as error:
        if source.conversations and "TemplateSyntaxError" in str(error):
            problem = f"the chat template is not valid Jinja: {error.args[-1]}"
            raise DataError(problem, fix=f"correct it, or set {source.where}.chat_template to another file") from None
    return template
