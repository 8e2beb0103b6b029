"""Keys of [data] that contradict each other."""

from typing import Any

import pytest

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.data import Data, check_sources

CHAT: dict[str, Any] = {"source": "jsonl", "path": "x", "messages_field": "m"}


@pytest.mark.parametrize(
    ("keys", "message", "fix"),
    [
        ({**CHAT, "messages_field": "", "prompt_field": "p"}, "data has no completion_field", "give both prompt_field"),
        ({**CHAT, "messages_field": "", "completion_field": "p"}, "data has no prompt_field", "or neither"),
        ({**CHAT, "prompt_field": "p", "completion_field": "c"}, "both messages_field and prompt_field", "one of them"),
        ({**CHAT, "text_field": "t"}, "data has both messages_field and text_field", "give one of them"),
        ({**CHAT, "token_field": "t"}, "data has both messages_field and token_field", "give one of them"),
        ({"loss_on": "all"}, "data.loss_on applies to conversations only", "set data.messages_field"),
        ({"too_long": "drop"}, "data.too_long applies to conversations only", "or remove too_long"),
        ({"messages_field": "m"}, "data.messages_field does nothing with source = 'python-stdlib'", "use source = "),
    ],
)
def test_keys_that_do_not_fit_conversations_are_refused(keys: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sources(Data(**keys), has_tokenizer=True)
    assert message in str(caught.value)
    assert fix in str(caught.value)
    check_sources(Data(**CHAT, loss_on="all", too_long="drop", chat_template="x"), has_tokenizer=True)
    check_sources(Data(source="python-docstrings", too_long="drop"), has_tokenizer=True)
