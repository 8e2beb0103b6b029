"""What the JSON files beside a tokenizer say of its special and added tokens, read as transformers 5 reads them."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from torchtitan_cp.config.json_types import Json, JsonObject
from torchtitan_cp.config.sections import Tokenizer
from torchtitan_cp.data.corpus.added_tokens import AddedToken
from torchtitan_cp.data.errors import DataError

CONFIG_FILE, MAP_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
SPECIAL_FILES = (CONFIG_FILE, MAP_FILE, ADDED_FILE)
MODEL_FILE, JSON_FILE = "tokenizer.model", "tokenizer.json"
# The names that transformers knows; a file may have others that end in _token.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_LISTS = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class TokenizerFiles:
    """The files beside a tokenizer.

    Attributes:
        settings: tokenizer_config.json.
        named: special tokens by name, e.g. eos_token, as a text or with flags; None if a file says that there is none.
        listed: added tokens by the id that a file gives them.
        extra: special tokens without a name.
        later: those of special_tokens_map.json, which count if there are no others.
        lists_all: false if tokenizer.json's own added tokens count as listed too.
    """

    settings: Mapping[str, Json]
    named: Mapping[str, str | AddedToken | None]
    listed: Mapping[int, AddedToken]
    extra: tuple[str | AddedToken, ...]
    later: tuple[str | AddedToken, ...]
    lists_all: bool

    @property
    def names(self) -> dict[str, str]:
        """The texts of the special tokens by name."""
        return {name: _text(token) for name, token in self.named.items() if token}

    def added(
        self, own: Mapping[int, AddedToken], named: Mapping[str, str], extra: Iterable[AddedToken] = ()
    ) -> list[AddedToken]:
        """The tokens that these files add or change, in the order in which new ones get their ids.

        Of a token that occurs twice, the later flags hold.

        Args:
            own: added tokens of tokenizer.json, by id.
            named: special tokens that the tokenizer has by name where no file names one.
            extra: special tokens that the tokenizer has where no file gives any.
        """
        listed = self.listed if self.lists_all else {**self.listed, **own}
        tokens = list[str | AddedToken](listed[index] for index in sorted(listed))
        known = {_text(token) for token in (*own.values(), *tokens)}
        names = {**named, **self.named}
        order = [*NAMES, *(name for name in names if name not in NAMES)]
        in_order = [token for token in map(names.get, order) if token]
        # As in transformers, a text differs from a token with flags, which therefore may come twice.
        others = dict.fromkeys(in_order + list(self.extra or tuple(extra) or self.later))
        tokens += [token for token in others if _text(token) not in known]
        special = {_text(token) for token in in_order}
        with_flags = [AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens]
        return [replace(token, special=token.special or token.content in special) for token in with_flags]


def read_tokenizer_files(folder: Path | None) -> TokenizerFiles:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json; any may be missing.

    As in transformers, a tokenizer_config.json with added_tokens_decoder stands alone. Without that key the names in
    special_tokens_map.json replace its own, and added_tokens.json is read.

    Raises:
        DataError: a file is not such JSON.
    """
    settings = _read(folder, CONFIG_FILE)
    lists_all = "added_tokens_decoder" in settings
    special_map, added = ({}, {}) if lists_all else (_read(folder, MAP_FILE), _read(folder, ADDED_FILE))
    for value in special_map.values():
        if isinstance(value, dict) and "content" in value:
            value["special"] = True
    with _name_file(folder, CONFIG_FILE if lists_all or not special_map else MAP_FILE):
        named = _read_names(settings, special_map)
        extra, later = _read_extra(settings, special_map)
        decoder = _table(settings.get("added_tokens_decoder", {}))
        listed = {int(index): _token(value) for index, value in decoder.items()}
    special = {_text(token) for token in (*named.values(), *extra) if token}
    with _name_file(folder, ADDED_FILE):
        for content, index in added.items():
            listed[_id(index)] = AddedToken(content, content in special, normalized=content not in special)
    listed = {index: token for index, token in listed.items() if token.content}
    return TokenizerFiles(settings, named, listed, extra, later, lists_all)


def _read_names(settings: JsonObject, special_map: JsonObject) -> dict[str, str | AddedToken | None]:
    """Special tokens by name, of tokenizer_config.json and special_tokens_map.json."""
    # Of names that transformers does not know, those of tokenizer_config.json stay.
    unknown = {name: value for name, value in settings.items() if name not in NAMES and isinstance(value, str)}
    found = {**settings, **special_map, **unknown}
    named = {name: _special(value) for name, value in found.items() if name in NAMES or name.endswith("_token")}
    for values in (_given_extra(settings), special_map.get(EXTRA_LISTS[0])):
        if isinstance(values, dict):
            named |= {name: _special(value) for name, value in values.items()}
    return named


def _given_extra(settings: JsonObject) -> Json:
    return next((settings[key] for key in EXTRA_LISTS if settings.get(key)), [])


def _read_extra(
    settings: JsonObject, special_map: JsonObject
) -> tuple[tuple[str | AddedToken, ...], tuple[str | AddedToken, ...]]:
    """`extra` and `later` of TokenizerFiles."""
    lists = (_given_extra(settings), *(special_map.get(key) for key in EXTRA_LISTS))
    extra, more, later = (map(_special, values) if isinstance(values, list) else () for values in lists)
    return tuple(token for token in dict.fromkeys((*extra, *more)) if token), tuple(token for token in later if token)


def read_own_added(folder: Path) -> dict[int, AddedToken]:
    """The added tokens of a tokenizer.json by id; empty without that file.

    Raises:
        DataError: the file is not such JSON.
    """
    with _name_file(folder, JSON_FILE):
        added = _read(folder, JSON_FILE).get("added_tokens", [])
        if not isinstance(added, list):
            raise TypeError(f"{added!r} is no list of tokens")
        return {_id(_table(token)["id"]): _token(token) for token in added}


def read_own_opening(folder: Path) -> list[str]:
    """The special tokens that a tokenizer.json puts before a text; none without that file.

    Raises:
        DataError: the file is not such JSON.
    """
    with _name_file(folder, JSON_FILE):
        processor = _table(_read(folder, JSON_FILE).get("post_processor") or {})
        steps = processor.get("processors") or [processor]
        found = [_table(step).get("single") for step in steps] if isinstance(steps, list) else []
        template = next((entry for entry in found if isinstance(entry, list)), [])
        opening = takewhile(lambda piece: "SpecialToken" in piece, map(_table, template))
        return [str(_table(piece["SpecialToken"])["id"]) for piece in opening]


def find_tokenizers(folder: Path) -> dict[str, Path]:
    """The tokenizer's files in a checkpoint's folder by tokenizer.kind, the preferred one first."""
    files = {"huggingface": folder / JSON_FILE, "sentencepiece": folder / MODEL_FILE}
    return {kind: file for kind, file in files.items() if file.is_file()}


def name_tokenizer_file(settings: Tokenizer) -> Tokenizer:
    """`[tokenizer]` with a file as its path: one that is a folder becomes the file of that kind in it.

    With the default kind, a folder without tokenizer.model has its tokenizer.json read.

    Raises:
        DataError: the folder has no such file.
    """
    folder = Path(os.path.expanduser(settings.path))
    if settings.kind == "bytes" or not settings.path or not folder.is_dir():
        return settings
    files = find_tokenizers(folder)
    kinds = [settings.kind] + ["huggingface"] * (settings.kind == Tokenizer().kind)
    for kind in kinds:
        if kind in files:
            return replace(settings, kind=kind, path=str(files[kind]))
    raise DataError(
        f"tokenizer.path = {settings.path!r} is a folder without "
        f"{JSON_FILE if settings.kind == 'huggingface' else f'{MODEL_FILE} and {JSON_FILE}'}",
        fix="give the folder or the path of a tokenizer.model (kind = 'sentencepiece') or tokenizer.json "
        "(kind = 'huggingface')",
    )


def read_model(path: Path) -> bytes:
    """The content of a tokenizer's file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"tokenizer.path = {str(path)!r} cannot be read: {error.strerror}", fix="give the path of a model file"
        ) from error


def not_a_model(path: Path, expected: str, reason: object) -> DataError:
    """The error for a file that is not `expected`."""
    return DataError(
        f"tokenizer.path = {str(path)!r} is not {expected}: {reason}",
        fix="give another file, or set tokenizer.kind to what it is (sentencepiece or huggingface)",
    )


def fingerprint_of(content: bytes, bos_ids: list[int]) -> str:
    """sha256 (hex) of what a tokenizer is, and of what it puts before a document."""
    return hashlib.sha256(content + f"bos {bos_ids}".encode() * bool(bos_ids)).hexdigest()


@contextmanager
def _name_file(folder: Path | None, name: str) -> Iterator[None]:
    """Name the file in the error for values of another form."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        path = (folder or Path()) / name
        raise DataError(f"{path} is not as transformers writes it: {error!r}", fix="correct or remove it") from error


def _read(folder: Path | None, name: str) -> JsonObject:
    """The JSON object in a file; empty if there is no file."""
    if not folder or not (folder / name).is_file():
        return {}
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / name} cannot be read: {error}", fix="correct or remove it") from error
    if not isinstance(values, dict):
        raise DataError(f"{folder / name} holds no JSON object", fix="correct or remove it")
    return values


def _special(value: Json) -> str | AddedToken | None:
    """A special token as a file gives it: its text, or an object with `content`; None if it gives no text."""
    if isinstance(value, dict):
        return _token(value) if value.get("content") else None
    return value if isinstance(value, str) and value else None


def _text(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content


def _table(value: Json) -> Mapping[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value


def _id(value: Json) -> int:
    if not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is no id of a token")
    return int(value)


def _token(token: Json) -> AddedToken:
    value = _table(token)
    special = bool(value.get("special"))
    flags = {key: bool(value.get(key)) for key in ("lstrip", "rstrip", "single_word")}
    if not isinstance(value["content"], str):
        raise TypeError(f"{value['content']!r} is no text of a token")
    return AddedToken(value["content"], special, bool(value.get("normalized", not special)), **flags)
