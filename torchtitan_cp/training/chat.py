"""The chat template of a run, and what depends on it: the frame of a prompt, and the tokens that end an answer."""

import itertools
import json
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.json_types import Json, JsonObject
from torchtitan_cp.data.corpus.chat import SAMPLE_TOOLS, ChatTemplate, Messages, find_chat_template
from torchtitan_cp.data.corpus.records import BadRecordError
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.evaluation.prompts import Frame
from torchtitan_cp.training.registry import start_folder

QUESTION, ANSWER = "QUESTIONPLACE", "ANSWERPLACE"  # sample content without spaces, which templates may strip
CALL_ID = "call00000"  # Mistral's templates want nine letters and digits


def chat_templates_of(config: Config) -> list[ChatTemplate]:
    """The different templates of the run's conversations; without any, that of its tokenizer or model.hub_checkpoint.

    Raises:
        DataError: conversations have no template, or it cannot be read.
    """
    sources = [*config.data.by_name().values()]
    sources = [source for source in sources if source.conversations] or sources[:1]
    found = [find_chat_template(source, config.tokenizer, start_folder(config.model)) for source in sources]
    return [template for index, template in enumerate(found) if template and template not in found[:index]]


def chat_template_of(config: Config) -> ChatTemplate | None:
    """The first of `chat_templates_of`: prompts are written with it, and exports have it. None if there is none.

    Raises:
        DataError: as chat_templates_of.
    """
    return next(iter(chat_templates_of(config)), None)


def encode_turns(template: ChatTemplate, tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Token ids of the messages and of the beginning of the assistant's turn.

    Raises:
        ConfigError: the template does not take these messages.
    """
    return _encode(_write(template, messages, add_generation_prompt=True), tokenizer)


def _write(template: ChatTemplate, messages: Messages, *, add_generation_prompt: bool, tools: Json = None) -> str:
    try:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except BadRecordError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ConfigError(
            f"the chat template does not take these messages (of {roles}): {': '.join(error.args)}",
            fix="set chat_template to a file with one that takes them; with generate, --system adds a system message",
        ) from error


def _write_around(
    template: ChatTemplate, messages: Messages, text: str, *, asks: bool, tools: Json = None
) -> tuple[str, str]:
    """What the template writes before and after a text that is in the messages.

    Args:
        asks: the messages end with a question, and the assistant's turn begins behind it.
        tools: of the conversation, which choose among templates with names.
    """
    before, separator, after = _write(template, messages, add_generation_prompt=asks, tools=tools).rpartition(text)
    if not separator:
        raise ConfigError("the chat template changes the text of messages", fix="give another one as chat_template")
    return before, after


def end_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer, without tools and with some, and a call of one.

    They are the tokenizer's end token, special tokens directly behind an answer, and the special token that a call
    ends with.

    Raises:
        ConfigError: the template does not take a question and its answer.
    """
    question, found, refusals = {"role": "user", "content": QUESTION}, {tokenizer.eos_id}, list[ConfigError]()
    for tools in (None, SAMPLE_TOOLS):
        turns = [question, {"role": "assistant", "content": ANSWER}]
        try:
            behind = _write_around(template, turns, ANSWER, asks=False, tools=tools)[1]
        except ConfigError as error:
            refusals.append(error)
            continue
        found |= {*itertools.takewhile(lambda token: not tokenizer.decode([token]), _encode(behind, tokenizer))}
    if len(refusals) == 2:
        raise refusals[0]
    for arguments in ({"a": ANSWER}, json.dumps({"a": ANSWER})):  # few templates take a text
        function = {"name": "f", "arguments": arguments}
        called: JsonObject = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
        }
        with suppress(ConfigError):
            behind = _write_around(template, [question, called], ANSWER, asks=False, tools=SAMPLE_TOOLS)[1]
            found |= {token for token in _encode(behind.rstrip(), tokenizer)[-1:] if not tokenizer.decode([token])}
    return frozenset(found)


def end_tokens_of(templates: Sequence[ChatTemplate], tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer or a call under any of these templates.

    Raises:
        ConfigError: as end_tokens, of the first. Of the others those that it would be raised for are left out.
    """
    found = set(end_tokens(templates[0], tokenizer) if templates else ())
    for template in templates[1:]:
        with suppress(ConfigError):
            found |= end_tokens(template, tokenizer)
    return frozenset(found)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    [(ids, _)] = tokenizer.encode_chat_batch([text])
    return ids.tolist()


def prompt_frame(template: ChatTemplate, tokenizer: Tokenizer) -> Frame:
    """What the template writes around a user's text, and the special tokens that it uses.

    Raises:
        ConfigError: the template does not take a conversation of one message.
    """
    around = _write_around(template, [{"role": "user", "content": QUESTION}], QUESTION, asks=True)
    opening, closing = (ids for ids, _ in tokenizer.encode_chat_batch(around))
    special = [token for token in (*opening.tolist(), *closing.tolist()) if not tokenizer.decode([token])]
    return Frame(opening, around[1], np.array(sorted({*special, *tokenizer.bos_ids, *end_tokens(template, tokenizer)})))
