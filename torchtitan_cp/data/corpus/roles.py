"""Who says a message: the roles of chat templates, and the names that other formats have for them."""

from collections.abc import Mapping

from torchtitan_cp.config.json_types import Json
from torchtitan_cp.data.corpus.records import BadRecordError, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
FIELDS_BESIDE_MESSAGES = ("system", "tools")  # of a row
CALLS = "function_call"  # a turn of the assistant whose text is the JSON of one call
# The names of ShareGPT (FastChat, Axolotl), of LLaMA-Factory's copies of it, and of Gemini.
NAMES_OF_ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    CALLS: "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def with_known_role(message: object) -> object:
    """A message of {from, value} as {role, content}, and its role by the name that templates know; others as they are.

    Raises:
        BadRecordError: a function_call whose value is not the JSON of a call.
    """
    if not isinstance(message, dict):
        return message
    if "role" not in message and "from" in message:
        others = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = {"role": message["from"], "content": message.get("value"), **others}
    role = message["role"] if isinstance(message.get("role"), str) else ""
    if role not in NAMES_OF_ROLES:
        return message
    call = _as_call(message) if role == CALLS else {}
    return {**message, "role": NAMES_OF_ROLES[role], **call}


def _as_call(message: Mapping[str, Json]) -> dict[str, Json]:
    """The content and the calls of a message whose text is a call, or a list of them."""
    text = message.get("content")
    problem = "function_call that is not the JSON of a call"
    calls = parse_json(text, problem) if isinstance(text, str) else None
    found = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in found):
        raise BadRecordError(problem, f"{text!r:.80}")
    return {"content": "", "tool_calls": [{"type": "function", "function": call} for call in found]}


def with_system(messages: object, system: object) -> object:
    """The messages after the system prompt that stands beside them, if they have none of their own.

    Raises:
        BadRecordError: a system prompt that is not a text.
    """
    if not system or not isinstance(messages, list):
        return messages
    if not isinstance(system, str):
        raise BadRecordError("system prompt that is not a text", f"{system!r:.80}")
    first = with_known_role(messages[0]) if messages else None
    has_own = isinstance(first, dict) and first.get("role") in ("system", "developer")
    return messages if has_own else [{"role": "system", "content": system}, *messages]


def known_roles() -> str:
    """The roles and the other names that are read, for messages."""
    others = ", ".join(f"{name} ({role})" for name, role in NAMES_OF_ROLES.items())
    return f"roles are {', '.join(ROLES)}, and by other names {others}"
