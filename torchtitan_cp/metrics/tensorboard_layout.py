"""The tab CUSTOM SCALARS of TensorBoard: which charts it has, and which run each of their lines is in.

TensorBoard colors by run, so each line of a chart with several is a run of its own, a folder below the run's. Lines of
one run are told apart by their markers only.
"""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)

# What stands before the last part of a tag is the tag of a chart, and the last part gives the name of a line's run.
LINES = {
    "validation/loss_by_source/": "source-{}",
    "validation/loss_at_end/": "{}-end",
    "validation/passkey_by_length/": "prompts-{}",
    "validation/multi_key_by_length/": "prompts-{}",
    "validation/variable_tracking_by_length/": "prompts-{}",
}


class ChartKind(NamedTuple):
    """Charts of the tags that match a pattern: one, or one for each text that takes the place of {} in the title.

    Attributes:
        title: {} is what the pattern's group matched.
        pattern: of whole tags.
        instead: a tag that is shown where none matches.
    """

    title: str
    pattern: str
    instead: str = ""


class Group(NamedTuple):
    """Charts below one heading.

    Attributes:
        closed: the reader has to open it.
        sparse: lines with few points. Where TensorBoard ignores outliers, as it does by default, an axis leaves out
            the highest and the lowest of few points, negative ones too. A chart with margins counts each point three
            times if the margins are the value itself, and so shows them all. It is not smoothed either.
    """

    title: str
    charts: tuple[ChartKind, ...]
    closed: bool = True
    sparse: bool = False


GROUPS = (
    Group(
        "Does it learn to use the context?",
        (
            ChartKind("planted keys found (1: all), by length of the prompt", "validation/passkey_by_length"),
            ChartKind("context gain, nats a token (above 0: it helps)", "validation/context_gain"),
            ChartKind("held-out loss, by source", "validation/loss_by_source", "validation/loss"),
            ChartKind("held-out loss, near and far end of the context", "validation/loss_at_end"),
            ChartKind("one of several keys found, by length", "validation/multi_key_by_length"),
            ChartKind("chains of variables found, by length", "validation/variable_tracking_by_length"),
        ),
        closed=False,
        sparse=True,
    ),
    Group(
        "Is it healthy, and what does it cost?",
        (
            ChartKind("training loss", "train/loss"),
            ChartKind("gradient norm", "train/grad_norm"),
            ChartKind("tokens per second", "speed/tokens_per_second"),
            ChartKind("MFU, fraction of the devices' peak", "speed/mfu"),
            ChartKind("peak memory of any rank, bytes", "memory/peak_bytes"),
        ),
        closed=False,
    ),
    Group(
        "More about held-out text",
        (
            ChartKind("loss, all sources", "validation/loss"),
            ChartKind("loss on the stage's own mixture", "validation/stage_loss"),
            ChartKind("loss of turn {} of a conversation", "validation/loss_by_turn/(.*)"),
            ChartKind("rise of the loss at the first stage's length", "validation/short_loss_rise"),
        ),
        sparse=True,
    ),
    Group(
        "Curriculum",
        (
            ChartKind("stage", "curriculum/stage"),
            ChartKind("sequence length", "curriculum/seq_len"),
            ChartKind("context-parallel degree", "curriculum/cp"),
            ChartKind("learning rate", "train/lr"),
            ChartKind("gate: {}", "gate/(.*?)(?:_wanted)?"),
        ),
    ),
    Group(
        "Time of a step, seconds",
        (
            ChartKind("whole step", "speed/step_seconds"),
            ChartKind("{}", "seconds/(.*)"),
            ChartKind("waiting for the batch", "speed/data_wait_seconds"),
        ),
    ),
    Group("Memory of rank 0, bytes", (ChartKind("{}", "memory/(?!peak_bytes)(.*)"),)),
)


def split_line(tag: str) -> tuple[str, str]:
    """The tag that TensorBoard gets for a tag, and the run it is in; the run is empty for most tags."""
    for prefix, run in LINES.items():
        if tag.startswith(prefix):
            return prefix.rstrip("/"), run.format(tag.removeprefix(prefix).replace("/", "%2F"))
    return tag, ""


def is_charted(tag: str) -> bool:
    """Whether a chart shows a tag, as split_line returns it."""
    kinds = [kind for group in GROUPS for kind in group.charts]
    return any(re.fullmatch(kind.pattern, tag) for kind in kinds) or tag in [kind.instead for kind in kinds]


def layout_event(tags: Collection[str]) -> Event:
    """An event with the charts of these tags. TensorBoard shows the last one that was written."""
    layout = Layout(category=filter(lambda category: category.chart, (_category(group, tags) for group in GROUPS)))
    plugin = SummaryMetadata.PluginData(plugin_name="custom_scalars")
    tensor = TensorProto(dtype="DT_STRING", string_val=[layout.SerializeToString()], tensor_shape=TensorShapeProto())
    value = Summary.Value(tag="custom_scalars__config__", tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin))
    return Event(summary=Summary(value=[value]))


def _category(group: Group, tags: Collection[str]) -> Category:
    charts: dict[str, list[str]] = {}
    for kind in group.charts:
        found = {tag: re.fullmatch(kind.pattern, tag) for tag in tags}
        for tag, match in found.items():
            if match:
                charts.setdefault(kind.title.format(*match.groups()), []).append(tag)
        if kind.instead in tags and not any(found.values()):
            charts[kind.title] = [kind.instead]
    make = _sparse_chart if group.sparse else _chart
    # TensorBoard draws charts with margins in the reverse of their order.
    ordered = list(charts.items())[:: -1 if group.sparse else 1]
    return Category(title=group.title, closed=group.closed, chart=[make(title, shown) for title, shown in ordered])


def _chart(title: str, tags: Iterable[str]) -> Chart:
    return Chart(title=title, multiline=MultilineChartContent(tag=[f"{re.escape(tag)}$" for tag in tags]))


def _sparse_chart(title: str, tags: Iterable[str]) -> Chart:
    series = [MarginChartContent.Series(value=tag, lower=tag, upper=tag) for tag in tags]
    return Chart(title=title, margin=MarginChartContent(series=series))
