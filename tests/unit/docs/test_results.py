"""The files of measurements say where their figures are from, and the pages name files that exist."""

import re
from pathlib import Path

import pytest

from tests.support.pages import PAGES, REPOSITORY, RESULTS

FIGURE_PAGES = ("benchmarks.md", "cuda.md", "performance.md")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_file_of_figures_begins_with_command_machine_and_versions(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.match(r"# .+\n\n- Command: .+\n(?:  .+\n)*- Machine: .+\n(?:  .+\n)*- Versions: .+\n", text)
    assert re.search(r"^\|[-|]+\|$", text, re.MULTILINE)


def test_every_file_of_figures_is_named_by_a_page_and_every_named_file_exists() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    on_figure_pages = "\n".join((REPOSITORY / "docs" / page).read_text(encoding="utf-8") for page in FIGURE_PAGES)
    named = {*re.findall(r"benchmarks/results/(\w+\.md)", text), *re.findall(r"`(\w+\.md)`", on_figure_pages)}
    assert named == {path.name for path in RESULTS}
