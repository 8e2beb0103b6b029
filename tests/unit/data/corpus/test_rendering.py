"""What a template marks as the assistant's is found wherever the marks stand."""

from typing import Any

import pytest

from tests.support.chats import FAMILIES, TOOLS, VARIABLES, call, marked, system, turns
from torchtitan_cp.data.corpus.rendering import render_template
from torchtitan_cp.data.errors import DataError

SAY = (
    "<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
)
EACH = "{% for m in messages %}BODY{% endfor %}"
KEPT = {
    "macro": f"{{% macro say(m) %}}{SAY}{{% endmacro %}}" + EACH.replace("BODY", "{{ say(m) }}"),
    "variable": EACH.replace("BODY", f"{{%- set body -%}} {SAY} {{%- endset -%}}\n{{{{ body }}}}"),
    "filter": EACH.replace("BODY", f"{{% filter trim %}}  {SAY}{{% endfilter %}}"),
    "recursive": f"{{% for m in messages recursive %}}{SAY}{{% endfor %}}",
    "a macro inside": "{% macro text(m) %}{{ m.content }}{{ eos_token }}{% endmacro %}"
    + EACH.replace("BODY", SAY.replace("{{ m.content }}{{ eos_token }}", "{{ text(m) }}")),
}


def render(source: str, messages: Any, tools: Any = None) -> tuple[str, list[str]]:
    text, ranges = render_template(source, messages, tools, VARIABLES, marks=True, prompt=False)
    return text, [text[start:stop] for start, stop in ranges]


@pytest.mark.parametrize("where", KEPT)
def test_marks_are_found_where_a_template_keeps_text_before_it_writes_it(where: str) -> None:
    messages = turns("a \ue000", "yes\ue001", "b", "")
    assert render(KEPT[where], messages) == (
        "<user>a \ue000<assistant>yes\ue001</s><user>b<assistant></s>",
        ["yes\ue001</s>", "</s>"],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_is_kept_whole_has_the_marks_that_transformers_finds_in_it(family: str) -> None:
    messages = [
        system("s"),
        *turns("  a \n", "\n\n b", "c", "d"),
        *turns("e"),
        call(a=1),
        *turns("f", first="assistant"),
    ]
    plain = [*turns("  a \n", "\n\n b", "c", "d")]
    source = marked(family)
    for row, tools in ((messages, TOOLS), (plain, None)) if family not in ("gemma3", "chatml") else ((plain, None),):
        expected = render(source, row, tools)
        assert any(expected[1])
        kept = f"{{% set whole %}}{source}{{% endset %}}{{{{ whole }}}}"
        assert render(kept, row, tools) == expected


def test_a_template_that_changes_what_it_marked_is_refused() -> None:
    source = EACH.replace("BODY", f"{{% filter upper %}}{SAY}{{% endfilter %}}")
    assert render(source, turns("a", "b"))[1] == ["B</S>"]
    source = EACH.replace("BODY", f"{{% filter trim %}}{SAY}{{% endfilter %}}").replace("eos_token", "' '")
    with pytest.raises(DataError, match=r"changes what {% generation %} marks, in a macro.*\n  fix: .* put the marks"):
        render(source, turns("a", "b"))
