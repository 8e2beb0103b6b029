"""A chat template as transformers runs it: the text of messages, and what of it `{% generation %}` blocks wrote."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from types import ModuleType

from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.json_types import Json
from torchtitan_cp.data.corpus.records import BadRecordError
from torchtitan_cp.data.errors import DataError

TODAY = datetime(2024, 7, 26)  # for every template, so that tokens depend on no day; the default of Llama 3.1's
GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
# Blocks of Jinja whose text is kept before it is written: transformers does not know where the marks in them end up.
KEEPS_TEXT = re.compile(r"\{%[-+]?\s*(?:macro\b|call\b|filter\b|set\b[^=%]*%\}|for\b[^%]*\brecursive\b)")
PRIVATE_USE = range(0xE000, 0xF900)

Messages = Sequence[Mapping[str, Json]]
Ranges = list[tuple[int, int]]  # (start, stop) of characters, in order and apart from each other


def render_template(
    source: str, messages: Messages, tools: Json, variables: Mapping[str, str], *, marks: bool, prompt: bool
) -> tuple[str, Ranges]:
    """The text of messages, and where the template's `{% generation %}` blocks wrote it.

    Args:
        source: Jinja text of the template.
        tools: a list of JSON schemas; None: there is no list.
        variables: what it reads beside the messages, such as eos_token.
        marks: look for the blocks; else none is found.
        prompt: the text ends where the assistant's turn begins.

    Raises:
        BadRecordError: the template refuses or cannot write the messages.
        DataError: it changes what a generation block wrote.
    """
    utils = import_extra("transformers.utils.chat_template_utils", extra="hub", needed_by="a chat template")
    # As apply_chat_template does: many templates would print the null.
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]

    def run(source: str, marks: bool, **functions: Callable[..., str]) -> tuple[str, Ranges]:
        return _run(utils, source, given, tools, variables, functions, marks=marks, prompt=prompt)

    if not (marks and KEEPS_TEXT.search(source)):
        return run(source, marks)
    text, _ = run(source, False)
    begin, end = islice((character for character in map(chr, PRIVATE_USE) if character not in text), 2)
    with_calls = GENERATION_TAG.sub(
        lambda tag: f"{tag[1]}{'endcall' if tag[2] else 'call mark_answer()'}{tag[3]}", source
    )
    marked, _ = run(with_calls, False, mark_answer=lambda caller: f"{begin}{caller()}{end}")
    before, *parts = marked.split(begin)
    ranges, plain = Ranges(), before
    for answer, _, after in (part.partition(end) for part in parts):
        ranges.append((len(plain), len(plain) + len(answer)))
        plain += answer + after
    if plain != text:
        raise DataError(
            "the chat template changes what {% generation %} marks, in a macro, a filter or a variable, so what is "
            "learned cannot be found in the text",
            fix="in a copy of the template, put the marks around what is written in the end",
        )
    return text, ranges


def _run(
    utils: ModuleType,
    source: str,
    messages: Messages,
    tools: Json,
    variables: Mapping[str, str],
    functions: Mapping[str, Callable[..., str]],
    *,
    marks: bool,
    prompt: bool,
) -> tuple[str, Ranges]:
    try:
        # render_jinja_template takes no function as a variable, but gets the template from the same cache.
        utils._compile_jinja_template(source).globals.update({"strftime_now": TODAY.strftime, **functions})
        [text], found = utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=source,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **variables,
        )
    except Exception as error:  # a template raises whatever its author chose
        raise BadRecordError("template error", f"{type(error).__name__}: {error}") from error
    return text, found[0] if found else []
