"""The reference of keys: each says what it means, the page is current, and what most people set comes first."""

import runpy
from pathlib import Path

from torchtitan_cp.config.reference import FIRST, as_text, first_keys, sections

REPOSITORY = Path(__file__).parents[3]


def test_every_key_says_what_it_means_and_the_reference_is_current() -> None:
    for _, about, keys in sections():
        assert about.endswith(".")
        assert all(key.help for key in keys)
    page = runpy.run_path(str(REPOSITORY / "docs" / "make_config_page.py"))["as_markdown"]()
    assert (REPOSITORY / "docs" / "config.md").read_text() == page, "run python docs/make_config_page.py"


def test_help_and_the_page_begin_with_what_most_people_set() -> None:
    assert len(FIRST) == 30
    assert [key.name for key in first_keys()] == list(FIRST)
    lines = as_text().splitlines()
    assert lines[0] == "What most people set"
    assert [line.split()[0] for line in lines[1:31]] == list(FIRST)
