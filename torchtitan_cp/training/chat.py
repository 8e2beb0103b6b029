"""The chat template of a run, and what depends on it: the frame of a prompt, and the tokens that end an answer."""

import itertools
from typing import Any

import numpy as np

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.data.corpus.chat import ChatTemplate, find_chat_template
from torchtitan_cp.data.corpus.records import BadRecordError
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.evaluation.prompts import Frame
from torchtitan_cp.training.registry import start_folder

QUESTION, ANSWER = "QUESTIONPLACE", "ANSWERPLACE"  # sample content without spaces, which templates may strip


def chat_template_of(config: Config) -> ChatTemplate | None:
    """The template of the run's conversations, or without any, that of its tokenizer or model.hub_checkpoint, if any.

    Raises:
        DataError: conversations have no template, or it cannot be read.
    """
    sources = sorted(config.data.by_name().values(), key=lambda source: not source.conversations)
    return find_chat_template(sources[0], config.tokenizer, start_folder(config.model))


def encode_turns(template: ChatTemplate, tokenizer: Tokenizer, messages: list[Any]) -> list[int]:
    """Token ids of the messages and of the beginning of the assistant's turn.

    Raises:
        ConfigError: the template does not take these messages.
    """
    [(ids, _)] = tokenizer.encode_chat_batch([_write(template, messages, add_generation_prompt=True)])
    return ids.tolist()


def _write(template: ChatTemplate, messages: list[Any], *, add_generation_prompt: bool) -> str:
    try:
        return template.render(messages, add_generation_prompt=add_generation_prompt)
    except BadRecordError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"the chat template does not take these messages (of {roles}): {': '.join(error.args)}",
            fix="set chat_template to a file with one that takes them; with generate, --system adds a system message",
        ) from error


def _write_around(template: ChatTemplate, messages: list[Any], text: str, *, asks: bool) -> tuple[str, str]:
    """What the template writes before and after a text that is in the messages.

    Args:
        asks: the messages end with a question, and the assistant's turn begins behind it.
    """
    before, separator, after = _write(template, messages, add_generation_prompt=asks).rpartition(text)
    if not separator:
        raise ConfigError("the chat template changes the text of messages", fix="give another one as chat_template")
    return before, after


def end_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's end token, and special tokens directly behind an answer.

    Raises:
        ConfigError: the template does not take a question and its answer.
    """
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    [(ids, _)] = tokenizer.encode_chat_batch([_write_around(template, turns, ANSWER, asks=False)[1]])
    special = itertools.takewhile(lambda token: not tokenizer.decode([token]), ids.tolist())
    return frozenset([tokenizer.eos_id, *special])


def prompt_frame(template: ChatTemplate, tokenizer: Tokenizer) -> Frame:
    """What the template writes around a user's text, and the special tokens that it uses.

    Raises:
        ConfigError: the template does not take a conversation of one message.
    """
    around = _write_around(template, [{"role": "user", "content": QUESTION}], QUESTION, asks=True)
    opening, closing = (ids for ids, _ in tokenizer.encode_chat_batch(around))
    special = [token for token in (*opening.tolist(), *closing.tolist()) if not tokenizer.decode([token])]
    return Frame(opening, around[1], np.array(sorted({*special, *tokenizer.bos_ids, *end_tokens(template, tokenizer)})))
