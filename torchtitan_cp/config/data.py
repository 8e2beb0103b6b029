"""[data], [[data.sources]] and what a stage changes of them, with the checks between their keys."""

import dataclasses
import math
import re
from dataclasses import dataclass, field

from torchtitan_cp.config import names
from torchtitan_cp.config.errors import ConfigError
from torchtitan_cp.config.key import check_read_keys, key


@dataclass(frozen=True)
class SourceKeys:
    """Where text or tokens come from, and what a document is.

    Attributes:
        source: python-stdlib: the running interpreter's own library; text: a folder or glob; jsonl: .jsonl[.gz|.zst];
            parquet: .parquet (extra parquet); huggingface: a dataset by name or folder (extra hub); python-docstrings:
            conversations about the functions and classes of the interpreter's own library; python-recall: that library
            with names and keys planted in it, for tiny models to find again
        path: file, folder or glob; with huggingface the dataset's name or a local folder
        subset: huggingface: the dataset's configuration, where it has several
        split: huggingface: the split that is read
        revision: huggingface: commit or tag of a dataset by name; without it a change there goes unnoticed
        text_field: field (column) of a row that holds the text
        token_field: field (column) of a row that holds token ids of this tokenizer, instead of text_field
        messages_field: field (column) of a row that holds a conversation, a list of {role, content} or {from, value},
            instead of text_field; the field `tools`, if there is one, holds the tools it may call
        prompt_field: field (column) with a text or messages to answer; with completion_field. Answers among these
            messages are learned as loss_on says
        completion_field: field (column) with the answer
        chat_template: Jinja file that writes conversations as text; default: the tokenizer's own
        loss_on: what of a conversation is learned: all turns of the assistant, its last one, or every token
        too_long: what becomes of a conversation with more tokens than max_document (0: than the longest seq_len): drop
            it, cut off its beginning or its end, or split it, after a learned turn where one ends in time
        group_field: field (column) with the group of a row, e.g. its repository; empty: no row is related to another
        document: what one document is: a file, or a folder's files joined in order (up to 1 MiB); a row is always one
        min_document: documents with fewer tokens are counted and left out
        max_document: documents with more tokens are split into even parts; 0: never
        validation_fraction: share of files (or rows) held out, chosen by hash
    """

    source: str = key("python-stdlib", choices=(*names.LIBRARY_SOURCES, "text", *names.ROW_SOURCES))
    path: str = key("", read_by=("text", *names.ROW_SOURCES))
    subset: str = key("", read_by=("huggingface",))
    split: str = key("train", read_by=("huggingface",))
    revision: str = key("", read_by=("huggingface",))
    text_field: str = key("text", read_by=names.ROW_SOURCES)
    token_field: str = key("", read_by=names.ROW_SOURCES)
    messages_field: str = key("", read_by=names.ROW_SOURCES)
    prompt_field: str = key("", read_by=names.ROW_SOURCES)
    completion_field: str = key("", read_by=names.ROW_SOURCES)
    chat_template: str = ""
    loss_on: str = key("assistant", choices=("assistant", "last_assistant", "all"))
    too_long: str = key("split", choices=("drop", "truncate_left", "truncate_right", "split"))
    group_field: str = key("", read_by=names.ROW_SOURCES)
    document: str = key("file", choices=("file", "folder"), read_by=("python-stdlib", "text"))
    min_document: int = key(0, least=0)
    max_document: int = key(0, least=0)
    validation_fraction: float = key(0.02, least=0, below=1)

    @property
    def conversations(self) -> bool:
        """Whether documents are conversations, of which some tokens are not learned."""
        return bool(self.messages_field or self.prompt_field) or self.source == "python-docstrings"

    @property
    def where(self) -> str:
        """How messages name the table these keys stand in."""
        return f"data.sources[{self.name!r}]" if isinstance(self, DataSource) else "data"


@dataclass(frozen=True)
class DataSource(SourceKeys):
    """One of several sources: keys as in [data], and a name. Each is tokenized and cached by itself.

    Attributes:
        name: what mixtures, tables and messages call it
    """

    name: str = ""


@dataclass(frozen=True)
class Data(SourceKeys):
    """Which text is read, and where its tokens are cached.

    Attributes:
        sources: [[data.sources]] tables, in place of the keys above for one source
        mixture: weight of each source by name; default: by their tokens; a stage may set its own
        max_epochs: how often the run may read a source, by name; after that its weight goes to the others
        order: related keeps documents of one group (folder, repository) together
        packing: concat cuts documents at sequence ends; best_fit keeps as many whole as fit, and of conversations all
            that fit a sequence, which may need padding. Default: best_fit for a stage that reads conversations, else
            concat
        packing_window: best_fit: sequences packed at once
        document_mask: tokens attend to their own document only, and its last token predicts nothing. Default: true for
            a stage that reads conversations, else false
        restart_positions: positions begin at 0 in each document. Default: true where conversations are masked
        workers: processes that read sequences and plan their attention; 0: a thread
        cache_folder: where tokens and the trained tokenizer are kept between runs
    """

    sources: tuple[DataSource, ...] = ()
    mixture: dict[str, float] = key({}, least=0)  # noqa: RUF009
    max_epochs: dict[str, float] = key({}, least=0)  # noqa: RUF009
    order: str = key("shuffled", choices=("shuffled", "related"))
    packing: str | None = key(None, choices=names.PACKINGS)
    packing_window: int = key(256, least=1)
    document_mask: bool | None = None
    restart_positions: bool | None = None
    workers: int = key(0, least=0)
    cache_folder: str = "outputs/cache"

    def by_name(self) -> dict[str, SourceKeys]:
        """Every source, in the file's order; the one that [data] itself describes is called `corpus`."""
        return {entry.name: entry for entry in self.sources} or {"corpus": self}


@dataclass(frozen=True)
class StageData:
    """How a stage reads its text; default for each key: the value in [data].

    Attributes:
        mixture: weight of each source by name
        packing: how documents become sequences
        packing_window: best_fit: sequences packed at once
        document_mask: tokens attend to their own document only
        restart_positions: positions begin at 0 in each document
        short_share: fraction of the sequences that are cut into pieces of short_seq_len, for a mix of lengths
        short_seq_len: tokens of a piece; tensor shapes stay, masks differ
        growth_from: tokens that attention sees in the stage's first step, growing to seq_len; 0: seq_len
        growth_steps: steps of that growth, by masks alone (SkyLadder)
    """

    mixture: dict[str, float] | None = key(None, least=0)  # noqa: RUF009
    packing: str | None = key(None, choices=names.PACKINGS)
    packing_window: int | None = key(None, least=1)
    document_mask: bool | None = None
    restart_positions: bool | None = None
    short_share: float = key(0.0, least=0, most=1)
    short_seq_len: int = key(0, least=0)
    growth_from: int = key(0, least=0)
    growth_steps: int = key(0, least=0)


@dataclass(frozen=True)
class ResolvedStageData(StageData):
    """StageData with [data] filled in where the stage says nothing.

    Attributes:
        conversations: the stage reads some.
    """

    mixture: dict[str, float]
    packing: str
    packing_window: int
    document_mask: bool
    restart_positions: bool
    max_epochs: dict[str, float] = field(default_factory=dict)
    conversations: bool = False


def check_sources(data: Data, has_tokenizer: bool) -> None:
    """Check that each source has a name that no other has, and only keys that its kind reads.

    Args:
        has_tokenizer: whether [tokenizer] names one; otherwise a tokenizer is trained on the text.

    Raises:
        ConfigError: the first rule that is broken, with its fix.
    """
    if data.sources:
        _check_names(data)
    check_mixture(data.mixture, data, "data.mixture")
    _check_source_names(data.max_epochs, data, "data.max_epochs")
    for source in data.by_name().values():
        where = source.where
        check_read_keys(source, "source", where)
        _check_fields(source)
        if source.token_field and not has_tokenizer:
            raise ConfigError(
                f"{where}.token_field = {source.token_field!r} holds token ids, and [tokenizer] names no tokenizer",
                fix="set tokenizer.kind and tokenizer.path to the tokenizer that made them",
            )
        if 0 < source.max_document < max(2, source.min_document):
            raise ConfigError(
                f"{where}.max_document = {source.max_document} is less than min_document = {source.min_document} or 2",
                fix="raise max_document, or set it to 0 to split nothing",
            )


def _check_fields(source: SourceKeys) -> None:
    where = source.where
    if bool(source.prompt_field) != bool(source.completion_field):
        missing = "prompt_field" if source.completion_field else "completion_field"
        raise ConfigError(f"{where} has no {missing}", fix="give both prompt_field and completion_field, or neither")
    fields = ("messages_field", "prompt_field", "text_field", "token_field")
    given = [name for name in fields if getattr(source, name) not in ("", getattr(SourceKeys, name))]
    if len(given) > 1:
        raise ConfigError(f"{where} has both {given[0]} and {given[1]}", fix="give one of them")
    for name in ("chat_template", "loss_on", "too_long"):
        if not source.conversations and getattr(source, name) != getattr(SourceKeys, name):
            raise ConfigError(
                f"{where}.{name} applies to conversations only",
                fix=f"set {where}.messages_field, or prompt_field and completion_field, or remove {name}",
            )


def _check_names(data: Data) -> None:
    for entry in dataclasses.fields(SourceKeys):
        if getattr(data, entry.name) != entry.default:
            raise ConfigError(
                f"data.{entry.name} is set beside [[data.sources]], and none of them reads it",
                fix=f"move {entry.name} into the tables it is meant for",
            )
    taken = [source.name for source in data.sources]
    for index, name in enumerate(taken):
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"data.sources[{index}].name = {name!r} is not a name", fix="use letters, digits, '_', '-' and '.'"
            )
        if name in taken[:index]:
            raise ConfigError(f"data.sources[{index}].name = {name!r} is taken", fix="give each source its own name")


def check_mixture(mixture: dict[str, float], data: Data, where: str) -> None:
    """Check that a mixture names sources of [data], and weighs at least one.

    Args:
        where: the dotted key of the mixture.

    Raises:
        ConfigError: the first rule that is broken, with its fix.
    """
    _check_source_names(mixture, data, where)
    if mixture and not 0 < sum(mixture.values()) < math.inf:
        raise ConfigError(f"{where} needs finite numbers that sum to more than zero", fix="give numbers above 0")


def _check_source_names(named: dict[str, float], data: Data, where: str) -> None:
    known = set(data.by_name())
    if unknown := sorted(set(named) - known):
        raise ConfigError(
            f"{where} names {', '.join(map(repr, unknown))}, and the sources are {', '.join(sorted(known))}",
            fix="use the names of [[data.sources]]; the one that [data] itself describes is 'corpus'",
        )


def check_stage_data(data: Data, own: ResolvedStageData, seq_len: int, where: str) -> None:
    """Check how a stage reads its text.

    Args:
        own: of the stage.
        seq_len: S of the stage, in tokens.
        where: their dotted name.

    Raises:
        ConfigError: the first rule that is broken, with its fix.
    """
    check_mixture(own.mixture, data, f"{where}.mixture")
    mixture = own.mixture or dict.fromkeys(data.by_name(), 1.0)
    if not any(data.max_epochs.get(name) != 0 for name, weight in mixture.items() if weight):
        raise ConfigError(
            f"data.max_epochs is 0 for every source that {where} reads", fix="give one of them a number above 0"
        )
    for length, other in (("short_seq_len", "short_share"), ("growth_from", "growth_steps")):
        tokens, value = getattr(own, length), getattr(own, other)
        if bool(tokens) != bool(value) or tokens >= seq_len:
            raise ConfigError(
                f"{where} has {length} = {tokens} and {other} = {value}",
                fix=f"give both, with a length below {seq_len}, or neither",
            )
