"""The page of what fits is what its command prints."""

import runpy

import pytest

from tests.support.pages import REPOSITORY

DOCS = REPOSITORY / "docs"
MADE = runpy.run_path(str(DOCS / "make_what_fits_page.py"))
AGAIN = "run python docs/make_what_fits_page.py > docs/what_fits.md"


def page() -> str:
    return (DOCS / "what_fits.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("trained", MADE["TRAINED"])
def test_the_lines_of_llama_at_128k_are_what_a_search_finds_now(trained: str) -> None:
    model, length = MADE["MODELS"][0], 128
    searches = MADE["search_row"](model, trained, length)
    section = page().partition(f"## {model.name}\n")[2].partition("\n## ")[0]
    assert MADE["length_row"](length, trained, searches) in section.splitlines(), AGAIN


@pytest.mark.deep
def test_the_page_is_what_its_command_prints() -> None:
    assert page() == MADE["as_markdown"](), AGAIN


def test_every_miss_of_the_page_says_of_which_memory() -> None:
    cells = [cell.strip() for line in page().splitlines() for cell in line.split("|")]
    misses = [cell for cell in cells if cell.startswith("*lacks*")]
    assert misses
    assert all(cell.endswith(("GiB GPU", "GiB host")) for cell in misses)
