"""What of a conversation its chat template leaves out, or writes in another form: an answer would be learned so.

Each piece of a conversation gets a mark of its own, and the template writes them all: the text has the marks of the
pieces that it has. Words are not looked for: those of a short piece are found somewhere in most texts.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchtitan_cp.config.json_types import Json
from torchtitan_cp.data.corpus.records import BadRecordError

# As transformers names them; it gives a template all that it reads.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
CALL_FIELDS = ("tool_calls", "function_call")
JSON_MARK = '{"JSONPLACE": 0}'  # in place of arguments
THOUGHT_END = "</think>"  # of reasoning at the beginning of a content

Messages = Sequence[Mapping[str, Json]]
Render = Callable[[Messages, Json], str]
Steps = tuple[str | int, ...]  # keys and indices that lead into nested values


class Piece(NamedTuple):
    """A part of a conversation that its text should have.

    Attributes:
        kind: `content`, `reasoning`, `tool call` or `tools`.
        message: its index; -1 for tools.
        paths: the keys and indices that lead from (messages, tools) to its places, all of which have the same text.
        shown: what names it to the user.
        end: the piece ends where this begins; empty: at the end of the text.
    """

    kind: str
    message: int
    paths: list[Steps]
    shown: str
    end: str = ""


def check_is_written(messages: Messages, tools: Json, learned: Sequence[int], render: Render) -> None:
    """Refuse a conversation of which the template does not write a piece.

    Templates drop the reasoning of turns before the last question, as they do when a model answers. They may, in turns
    that are not learned.

    Args:
        learned: indices of the messages that are learned.
        render: writes messages and tools.

    Raises:
        BadRecordError: the first such piece.
    """
    pieces = list(_pieces(messages, tools))
    marks = [f"\ue000{number}\ue001" for number in range(len(pieces))]
    marked_text = _rendered(_marked(messages, tools, zip(pieces, marks, strict=True)), render)
    for piece, mark in zip(pieces, marks, strict=True):
        if mark in marked_text or _changes_text(piece, messages, tools, render):
            continue
        verb = "does not write"
        if piece.kind == "reasoning" and _changes_text(piece, messages[: piece.message + 1], tools, render):
            verb = "leaves out of earlier turns"
        if verb == "does not write" or piece.message in learned:
            owner = f"of the {messages[piece.message]['role']}: " if piece.message >= 0 else ""
            raise BadRecordError(f"{piece.kind} that the template {verb}", f"{owner}{piece.shown!r:.80}")


def check_form(messages: Messages, tools: Json, text: str, render: Render) -> None:
    """Refuse a conversation if the template writes a part of it in the wrong form.

    A template that takes only texts prints a list of parts as Python does. One that takes the arguments of a call as
    an object, as transformers wants them, quotes them where they are the JSON of one.

    Args:
        text: the conversation as the template writes it.
        render: writes messages and tools.

    Raises:
        BadRecordError: the first such part.
    """
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        if content and isinstance(content, list) and str(content) in text:
            raise BadRecordError("content of parts that the template prints as a list", f"message {number}")
    if not any(message.get(name) for message in messages for name in CALL_FIELDS):
        return
    row: Any = _copy([messages, tools])  # nested, and changed in place
    calls = [
        (number, call.get("function") or call)
        for number, message in enumerate(row[0], start=1)
        for name in CALL_FIELDS
        for _, call in _places((), message.get(name) or [])
        if isinstance(call, dict)
    ]
    texts = [(number, call, call["arguments"]) for number, call in calls if _has_json_arguments(call)]
    for _, call, _ in texts:
        call["arguments"] = JSON_MARK
    for number, _, arguments in texts[:1]:
        if json.dumps(JSON_MARK) in _rendered(row, render):
            shown = f"message {number}: {arguments!r:.60}; give an object"
            raise BadRecordError("arguments of a call that the template writes as a quoted text", shown)


def _has_json_arguments(call: Json) -> bool:
    """Whether the arguments of a call are a text, and this is the JSON of an object."""
    arguments = call.get("arguments") if isinstance(call, dict) else None
    try:
        return isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _rendered(row: tuple[Messages, Json], render: Render) -> str:
    """The text of messages and tools; empty if the template refuses them."""
    try:
        return render(*row)
    except BadRecordError:
        return ""


def _changes_text(piece: Piece, messages: Messages, tools: Json, render: Render) -> bool:
    """Whether another piece gives another text. A template that refuses it reads it."""
    mark = [(piece, "\ue000\ue001")]
    try:
        text = render(messages, tools)
        return any(render(*_marked(messages, tools, mark, before=before)) != text for before in (False, True))
    except BadRecordError:
        return True


def _marked(
    messages: Messages, tools: Json, marks: Iterable[tuple[Piece, str]], *, before: bool = False
) -> tuple[Messages, Json]:
    """A copy of messages and tools in which pieces have marks: (piece, mark) for each."""
    row: Any = _copy([messages, tools])  # nested, and changed in place
    for piece, mark in marks:
        for *parents, key in piece.paths:
            place = row
            for step in parents:
                place = place[step]
            if piece.end:
                head, end, tail = place[key].partition(piece.end)
                place[key] = f"{_with_mark(head, mark, before)}{end}{tail}"
            else:
                place[key] = _with_mark(place[key], mark, before)
    return row[0], row[1]


def _copy(value: Json) -> Json:
    if isinstance(value, dict):
        return {name: _copy(entry) for name, entry in value.items()}
    return [_copy(entry) for entry in value] if isinstance(value, list | tuple) else value


def _with_mark(value: Json, mark: str, before: bool) -> Json:
    """A value in which every text and number has the mark."""
    if isinstance(value, dict):
        return {name: _with_mark(entry, mark, before) for name, entry in value.items()}
    if isinstance(value, list):
        return [_with_mark(entry, mark, before) for entry in value]
    return value if value is None else f"{mark}{value}" if before else f"{value}{mark}"


def _pieces(messages: Messages, tools: Json) -> Iterator[Piece]:
    """The pieces that say something, in order."""
    for index, tool in enumerate(tools if isinstance(tools, list) else []):
        path, body = _function((1, index), tool)
        for name in [name for name in ("name", "description") if _says_something(body.get(name))][:1]:
            yield Piece("tools", -1, [(*path, name)], str(body[name]))
    for index, message in enumerate(messages):
        for path, text in _places((0, index, "content"), message.get("content")):
            text_path, text = ((*path, "text"), text["text"]) if isinstance(text, dict) else (path, text)
            thought, end, words = str(text or "").rpartition(THOUGHT_END)
            if _says_something(words):
                yield Piece("content", index, [text_path], _last_word(words))
            if message["role"] == "assistant" and _says_something(thought.replace("<think>", "")):
                yield Piece("reasoning", index, [text_path], _last_word(thought), end)
        names = [name for name in REASONING_FIELDS if _says_something(message.get(name))]
        if names:
            yield Piece("reasoning", index, [(0, index, name) for name in names], _last_word(message[names[0]]))
        for name in CALL_FIELDS:
            for path, call in _places((0, index, name), message.get(name) or []):
                yield from _call_pieces(index, path, call)


def _places(path: Steps, value: Json) -> list[tuple[Steps, Json]]:
    """Each entry of a list with its path, or the value itself."""
    return (
        [((*path, number), entry) for number, entry in enumerate(value)] if isinstance(value, list) else [(path, value)]
    )


def _call_pieces(index: int, path: Steps, call: Json) -> Iterator[Piece]:
    """The name of a function that is called, and its arguments."""
    body_path, body = _function(path, call)
    name, shown = body.get("name"), str(body.get("name") or call)
    if _says_something(name):
        # Some templates write the id instead, which then holds the name.
        has_id = isinstance(call, dict) and str(name) in str(call.get("id"))
        ids = [(*path, "id")] if has_id else []
        yield Piece("tool call", index, [(*body_path, "name"), *ids], shown)
    if _says_something(body.get("arguments")):
        yield Piece("tool call", index, [(*body_path, "arguments")], shown)
    if not body.keys() & {"name", "arguments"} and _says_something(call):
        yield Piece("tool call", index, [path], shown)


def _function(path: Steps, value: Json) -> tuple[Steps, Mapping[str, Json]]:
    """Path and value of the function in a tool or a call, which may be the function itself."""
    inner = value.get("function") if isinstance(value, dict) else None
    if isinstance(inner, dict):
        return (*path, "function"), inner
    return path, value if isinstance(value, dict) else {}


def _says_something(value: Json) -> bool:
    """Whether a nested value has a number or a text that is not blank."""
    if isinstance(value, dict | list):
        return any(map(_says_something, value.values() if isinstance(value, dict) else value))
    return value is not None and bool(str(value).strip())


def _last_word(text: Json) -> str:
    return str(text).rsplit(maxsplit=1)[-1]
