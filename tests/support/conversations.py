"""A source of conversations, prepared with the bytes as tokens, and what of it is learned."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.chats import turns, write_rows
from tests.support.corpus_cache import only
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.store import TokenStore

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
