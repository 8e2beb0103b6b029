"""The chat template of a run, and what follows from it: the frame of a prompt, the tokens that end an answer."""

from typing import Any

import numpy as np

from torchtitan_cp.config import Config
from torchtitan_cp.data.corpus.chat import ChatTemplate, find_chat_template
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.data.errors import DataError
from torchtitan_cp.evaluation import Frame
from torchtitan_cp.training.registry import start_folder

QUESTION, ANSWER = "QUESTIONPLACE", "ANSWERPLACE"  # stand for content; templates may strip spaces around it


def chat_template_of(config: Config) -> ChatTemplate | None:
    """The template of the run's conversations; without any, that of its tokenizer or start, None if they have none.

    Raises:
        DataError: there is none for the conversations, or it cannot be read.
    """
    sources = sorted(config.data.by_name().values(), key=lambda source: not source.conversations)
    try:
        return find_chat_template(sources[0], config.tokenizer, start_folder(config.model))
    except DataError:
        if sources[0].conversations:
            raise
        return None


def encode_turns(template: ChatTemplate, tokenizer: Tokenizer, messages: list[Any]) -> list[int]:
    """Tokens of messages and of the beginning of the assistant's turn."""
    [(ids, _)] = tokenizer.encode_chat_batch([template.render(messages, add_generation_prompt=True)])
    return ids.tolist()


def end_tokens(template: ChatTemplate, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's end of text, and the special ones right behind an answer."""
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    [(ids, _)] = tokenizer.encode_chat_batch([template.render(turns).rpartition(ANSWER)[2]])
    behind = ids.tolist()
    count = next((place for place, token in enumerate(behind) if tokenizer.decode([token])), len(behind))
    return frozenset([tokenizer.eos_id, *behind[:count]])


def prompt_frame(template: ChatTemplate, tokenizer: Tokenizer) -> Frame:
    """What the template writes around the text of a user, and the special tokens that it uses."""
    text = template.render([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    before, _, after = text.rpartition(QUESTION)
    opening, closing = (ids for ids, _ in tokenizer.encode_chat_batch([before, after]))
    special = [token for token in (*opening.tolist(), *closing.tolist()) if not tokenizer.decode([token])]
    return Frame(opening, closing, np.array(sorted({*special, *end_tokens(template, tokenizer)})))
