"""TensorBoard's first page in a browser: the charts draw, each line in a color of its own, and no value is cut off."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import answer, browser, free_port, needs_browser, process, wait_for
from tests.support.step_records import record
from torchtitan_cp.evaluation.result import EvaluationResult, Retrieval
from torchtitan_cp.metrics.tensorboard_layout import GROUPS
from torchtitan_cp.metrics.tensorboard_sink import TENSORBOARD_FOLDER, TensorBoardSink

pytestmark = [pytest.mark.jobs, pytest.mark.deep, needs_browser]
LENGTHS = (512, 1024, 2048, 4096)
NOT_ASKED = ("validation/multi_key_by_length", "validation/variable_tracking_by_length")
GAINS = (-0.3, 0.01, 0.02, 0.5)  # TensorBoard takes the first and the last for outliers
# Cards of charts, in shadow roots: title, names of series, colors of the lines drawn, and the ends of the y axis.
READ_CHARTS = """
const find = (root, name, found = []) => {
    for (const element of root.querySelectorAll("*")) {
        if (element.localName === name) found.push(element);
        if (element.shadowRoot) find(element.shadowRoot, name, found);
    }
    return found;
};
const cards = ["margin", "multi-line"].flatMap(kind => find(document, `tf-custom-scalar-${kind}-chart-card`));
return cards.map(card => {
    const lines = find(card.shadowRoot, "path").filter(path => path.classList.contains("line"));
    const drawn = lines.filter(path => path.getAttribute("stroke") && (path.getAttribute("d") || "").length > 20);
    const y_axis = find(card.shadowRoot, "vz-line-chart2")[0]?._chart?.yScale.domain() ?? [];
    const {x, y} = card.getBoundingClientRect();
    return {
        title: card.title, place: [y, x], series: card._seriesNames, missing: card._missingTags?.length ?? 0,
        colors: drawn.map(path => path.getAttribute("stroke")), y_axis,
    };
});
"""


def write_run(folder: Path) -> None:
    """Steps and evaluations, the first of which has no context gain."""
    sink = TensorBoardSink(folder, 0)
    for step in range(41):
        sink.scalars(record(step, 5.0 - step / 20).scalars(), step)
        if step % 10 == 0:
            done = step // 10
            accuracy = np.array([[min(1.0, max(0.0, (done - index) * 0.5)) for index in range(len(LENGTHS))]])
            result = EvaluationResult(
                4.0 - done,
                6.0,
                {"books (old)": 3.0 - done / 2, "code": 2.0},
                [0, 16, 64, 256, 1024, 2048],
                [3.0, 2.9, 2.8, 2.7 - done / 9, 2.6, 2.5 - done / 4],
                context_gain=GAINS[done - 1] if done else None,
                retrieval={"passkey": Retrieval(accuracy, LENGTHS, (0.0,))},
            )
            sink.scalars({f"validation/{name}": value for name, value in result.scalars(4096).items()}, step)
    sink.close()


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """The charts of the page by title, in the order in which they are seen."""
    folder, port, seen = tmp_path_factory.mktemp("board"), free_port(), list[dict[str, Any]]()
    write_run(folder)
    board = ("-m", "tensorboard.main", "--logdir", str(folder / TENSORBOARD_FOLDER), "--port", str(port))
    with process(sys.executable, *board), browser(folder / "profile") as window:
        wait_for(lambda: answer(f"http://127.0.0.1:{port}/data/runs"), "TensorBoard to read the run")
        window.open(f"http://127.0.0.1:{port}/#custom_scalars")

        def all_drawn() -> bool:
            seen[:] = window.run(READ_CHARTS)
            return len(seen) > 8 and all(len(chart["colors"]) >= len(chart["series"]) > 0 for chart in seen)

        wait_for(all_drawn, "the charts to draw")
        yield {chart["title"]: chart for chart in sorted(seen, key=lambda chart: chart["place"])}


def test_every_chart_of_the_first_page_draws_in_its_place_and_none_is_empty(charts: dict[str, dict[str, Any]]) -> None:
    kinds = [kind for group in GROUPS for kind in group.charts if not group.closed]
    assert list(charts) == [kind.title for kind in kinds if kind.pattern not in NOT_ASKED]
    assert not any(chart["missing"] for chart in charts.values())


def test_lines_of_a_chart_have_different_colors(charts: dict[str, dict[str, Any]]) -> None:
    count = {title: len(chart["series"]) for title, chart in charts.items() if len(chart["series"]) > 1}
    assert list(count.values()) == [len(LENGTHS), 2, 2], "prompts, sources, near and far end"
    for title in count:
        assert len(set(charts[title]["colors"])) == count[title], title


def test_axes_show_the_lowest_and_the_highest_of_few_values(charts: dict[str, dict[str, Any]]) -> None:
    [low, high] = charts["context gain, nats a token (above 0: it helps)"]["y_axis"]
    assert low < min(GAINS)
    assert high > max(GAINS)
