"""Names that other formats have for the roles of a conversation."""

import pytest

from torchtitan_cp.data.corpus.records import BadRecordError
from torchtitan_cp.data.corpus.roles import NAMES_OF_ROLES, ROLES, known_roles, with_known_role, with_system


def test_every_other_name_leads_to_a_role_of_templates() -> None:
    assert set(NAMES_OF_ROLES.values()) <= set(ROLES)
    assert not NAMES_OF_ROLES.keys() & set(ROLES)
    assert all(name in known_roles() for name in (*ROLES, *NAMES_OF_ROLES))


def test_from_and_value_become_role_and_content_and_other_keys_stay() -> None:
    message = {"from": "gpt", "value": "a", "weight": 0, "value_of": 2}
    assert with_known_role(message) == {"role": "assistant", "content": "a", "weight": 0, "value_of": 2}
    plain = {"role": "user", "content": "a", "from": "an address"}
    assert with_known_role(plain) == plain
    assert with_known_role({"role": "human", "content": "a"}) == {"role": "user", "content": "a"}
    assert with_known_role({"from": "narrator", "value": "a"}) == {"role": "narrator", "content": "a"}
    for other in ("text", None, {"role": None}, {"from": ["gpt"]}):
        assert with_known_role(other) in (other, {"role": ["gpt"], "content": None})


def test_the_text_of_a_function_call_becomes_calls_of_tools() -> None:
    call = {"name": "add", "arguments": {"a": 2}}
    expected = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    text = '{"name": "add", "arguments": {"a": 2}}'
    assert with_known_role({"from": "function_call", "value": text}) == expected
    twice = with_known_role({"from": "function_call", "value": f"[{text}, {text}]"})
    assert twice == {**expected, "tool_calls": expected["tool_calls"] * 2}
    for bad in ("add(2)", "[1]", '{"arguments": {}}', None):
        with pytest.raises(BadRecordError, match="function_call that is not the JSON of a call"):
            with_known_role({"from": "function_call", "value": bad})


def test_the_system_prompt_of_a_row_comes_first_unless_the_conversation_has_one() -> None:
    question = {"from": "human", "value": "a"}
    assert with_system([question], "Be brief.") == [{"role": "system", "content": "Be brief."}, question]
    for own in ({"from": "system", "value": "b"}, {"role": "developer", "content": "b"}):
        assert with_system([own, question], "Be brief.") == [own, question]
    for nothing in ("", None):
        assert with_system([question], nothing) == [question]
    for no_messages in (None, "text"):
        assert with_system(no_messages, "Be brief.") == no_messages
    with pytest.raises(BadRecordError, match="system prompt that is not a text"):
        with_system([question], ["Be brief."])
