"""Text to tokens and back, by SentencePiece, by bytes or by a Hugging Face tokenizer.json."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import sentencepiece
from numpy.typing import ArrayLike

from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.added_tokens import AddedToken, encode_around_tokens, token_starts
from torchtitan_cp.data.corpus.huggingface_tokenizer import HuggingFaceTokenizer
from torchtitan_cp.data.corpus.tokenizer_files import (
    CONFIG_FILE,
    JSON_FILE,
    MODEL_FILE,
    SPECIAL_FILES,
    TokenizerFiles,
    fingerprint_of,
    not_a_model,
    read_model,
    read_own_added,
    read_own_opening,
    read_tokenizer_files,
)
from torchtitan_cp.data.errors import DataError

END_NAME = "</s>"  # of bytes, and of a tokenizer trained on the corpus
SPACE_MARK = "\u2581"
NO_PREFIX = b"\x1a\x02\x18\x00"  # after a SentencePiece model: normalizer_spec { add_dummy_prefix: false }, in protobuf
# Files that transformers writes with a tokenizer.
COMPANIONS = (*SPECIAL_FILES, "chat_template.jinja", JSON_FILE, MODEL_FILE, "vocab.json", "merges.txt")


class SentencePieceTokenizer:
    """A SentencePiece model file. Its threads are C++ threads that run without Python's lock.

    Special and added tokens are those of the model and of the files beside it.

    Args:
        path: the model.
        bos: whether documents begin with a BOS token, if a tokenizer_config.json beside the file says so, or, where
            that says nothing, a tokenizer.json beside it.

    Attributes:
        vocab_size: V; every id is below it.
        bos_ids: ids that begin a document. `encode_batch` never returns them.
        eos_id: the token that ends a document. `encode_batch` never returns it.
        eos_token: how a chat template writes that token.
        special_tokens: texts of special tokens by name, as chat templates read them: eos_token and others.
        unknown_id: what stands for text that the tokenizer does not know; None: nothing does.
        lost: what happens to text that it has no token for, in words; empty: nothing is lost.
        added: ids of the added tokens.
        fingerprint: different for every tokenizer.
        path: its file; None if it has none.
        threads: that tokenize a batch.
        spaces: "   a" as the model normalizes it.

    Raises:
        DataError: the file holds no model, or one without an end-of-text token.
    """

    def __init__(self, path: Path, bos: bool = True) -> None:
        model = read_model(path)
        self.path: Path | None = path
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._pieces: int = self._processor.vocab_size()
        except (RuntimeError, OSError) as error:
            raise not_a_model(path, "a SentencePiece model", error) from error
        if not self._pieces:
            raise not_a_model(path, "a SentencePiece model", "it is empty")
        files, names = read_tokenizer_files(path.parent), self._own_names()
        own = {name: text for name, text in names.items() if name not in files.named or name == "eos_token"}
        self.special_tokens = own | files.names
        if "eos_token" not in self.special_tokens:
            raise DataError(
                f"the SentencePiece model {path} has no end-of-text token, which ends each document",
                fix=f"name one as eos_token in a {CONFIG_FILE} beside it, train it with eos_id >= 0, or leave "
                "tokenizer.path out to train one on the corpus",
            )
        self.added = self._number_added(files)
        ids = {token.content: index for token, index in self.added.items()}
        self.vocab_size: int = max(self._pieces, *(index + 1 for index in ids.values()))
        self.eos_token: str = self.special_tokens["eos_token"]
        self.eos_id: int = ids[self.eos_token]
        self.bos_ids = [ids[text] for text in self._opening(files)] if bos else []
        own_ids = {AddedToken(text, special=True): self._piece_id(text) for text in (*self._control(), *names.values())}
        changed = [f"{token} {index}" for token, index in self.added.items() if own_ids.get(token) != index]
        changed += [self.eos_token] * (self.eos_token != names.get("eos_token"))
        known = [token for token in self.added if self._knows(token)]
        changed += [f"cut {token.content}" for token in known]
        self.fingerprint = fingerprint_of(model + "".join(sorted(changed)).encode(), self.bos_ids)
        self.spaces: str = self._processor.normalize("   a")
        self.unknown_id: int | None = self._processor.unk_id()
        self.lost = ""
        self.threads = usable_cores()
        self._chat_literals = {token: [index] for token, index in self.added.items()} | self._find_marks()
        self._literals = {token: None if token.special else row for token, row in self._chat_literals.items()}
        self._literals |= {token: [] for token in known}
        read = [token.pattern for token, row in self._literals.items() if row is not None]
        self._has_literal = re.compile("|".join(read)).search if read else lambda text: None
        # What ids decode to that SentencePiece does not know, or knows by another text.
        texts = {index: "" if token.special else token.content for token, index in self.added.items()}
        self._texts = {index: text for index, text in texts.items() if text or not self._is_control(index)}

    def _opening(self, files: TokenizerFiles) -> list[str]:
        """The BOS token, or nothing, as transformers would put it before a text."""
        assert self.path
        opening = [text for name, text in self.special_tokens.items() if name == "bos_token"]
        adds = files.settings.get("add_bos_token")
        return opening if adds is True or (adds is None and opening == read_own_opening(self.path.parent)) else []

    def _own_names(self) -> dict[str, str]:
        """The model's own bos_token, eos_token and unk_token, those that it has."""
        ids = {f"{name}_token": getattr(self._processor, f"{name}_id")() for name in ("bos", "eos", "unk")}
        return {name: self._processor.id_to_piece(index) for name, index in ids.items() if index >= 0}

    def _control(self) -> list[str]:
        """The model's control pieces."""
        return [self._processor.id_to_piece(index) for index in range(self._pieces) if self._is_control(index)]

    def _is_control(self, index: int) -> bool:
        return index < self._pieces and bool(self._processor.is_control(index))

    def _number_added(self, files: TokenizerFiles) -> dict[AddedToken, int]:
        """The added tokens with their ids: a piece's, or that of a piece which a file renames, or a new one."""
        assert self.path
        control = [AddedToken(text, special=True) for text in self._control()]
        beside = read_own_added(self.path.parent)
        given = {token.content: index for index, token in files.listed.items() if index < self._pieces}
        given |= {token.content: index for index, token in beside.items()}
        numbered, size = dict[str, tuple[AddedToken, int]](), self._pieces
        for token in (*control, *beside.values(), *files.added(beside, self.special_tokens, control)):
            index = numbered[token.content][1] if token.content in numbered else self._piece_id(token.content)
            index = given.get(token.content, size) if index < 0 else index
            numbered[token.content], size = (token, index), max(size, index + 1)
        return dict(numbered.values())

    def _piece_id(self, text: str) -> int:
        """The id of the piece with this text; -1 without one."""
        index: int = self._processor.piece_to_id(text)
        return index if self._processor.id_to_piece(index) == text else -1

    def _knows(self, token: AddedToken) -> bool:
        """Whether the model itself reads a special token from plain text, as it does user-defined pieces."""
        texts = token.in_texts if token.special else []
        return any(self.added[token] in row for row in self._processor.encode(texts, num_threads=1))

    def _find_marks(self) -> dict[AddedToken, list[int]]:
        """U+2581 and the byte tokens that spell it; empty if the model is not lossless anyway.

        SentencePiece writes a space as U+2581, and would decode a U+2581 that a text contains as a space.
        """
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        adds_prefix = self._processor.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        has_bytes = all(self._processor.is_byte(token) for token in ids)
        return {AddedToken(SPACE_MARK, normalized=True): ids} if has_bytes and not adds_prefix else {}

    @cached_property
    def _without_prefix(self) -> sentencepiece.SentencePieceProcessor:
        """The same model, but it adds no space before a text."""
        return sentencepiece.SentencePieceProcessor(model_proto=self._processor.serialized_model_proto() + NO_PREFIX)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, `[tokens]` int32, without special tokens, on all usable cores."""
        rows = self._processor.encode(list(texts), num_threads=self.threads)
        for index, text in enumerate(texts):
            if self._has_literal(text):
                [(rows[index], _)] = encode_around_tokens([text], self._literals, self._encode_with_starts)
        return [np.asarray(row, dtype=np.int32) for row in rows]

    def encode_chat_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens of conversations as a chat template writes them: special tokens are read from the text.

        For `sentencepiece` these are the control pieces and added tokens, for `bytes` it is eos_token. No token is
        put before or after the text, and `sentencepiece` adds no space after a special token. Characters in no token,
        such as spaces that the model drops, belong to the token after them. Runs on all usable cores.

        Returns:
            for each text its token ids, `[n]` int32, and the character at which each begins, `[n]` int64.
        """
        return encode_around_tokens(texts, self._chat_literals, self._encode_with_starts)

    def _encode_with_starts(self, parts: list[str], behind: bool) -> list[tuple[ArrayLike, ArrayLike, int]]:
        processor = self._without_prefix if behind else self._processor
        rows = processor.encode(parts, return_type="offset_mapping", num_threads=self.threads)
        return [
            (row["ids"], token_starts(row["offsets"]), max((stop for _, stop in row["offsets"]), default=0))
            for row in rows
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        runs, texts = [list[int]()], [""]
        for token in map(int, ids):
            text = self._texts.get(token)
            if text is None:
                runs[-1].append(token)
            elif text:
                runs.append([])
                texts.append(text)
        processors = [self._processor] + [self._without_prefix] * (len(runs) - 1)
        return "".join(
            text + (processor.decode(run) if run else "")
            for processor, text, run in zip(processors, texts, runs, strict=True)
        )

    def vocabulary(self) -> dict[int, str]:
        """The pieces by id, without special and added tokens."""
        added = set(self.added.values())
        return {index: self._processor.id_to_piece(index) for index in range(self._pieces) if index not in added}


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and 256 to end a document."""

    path: Path | None = None
    vocab_size, eos_id, eos_token, fingerprint = 257, 256, END_NAME, "bytes"
    bos_ids: Sequence[int] = ()
    unknown_id: int | None = None
    lost = ""
    special_tokens: Mapping[str, str] = {"eos_token": END_NAME}
    added: Mapping[AddedToken, int] = {AddedToken(END_NAME, special=True): 256}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The UTF-8 bytes of each text, `[bytes]` int32."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def encode_chat_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(`[n]` ids, `[n]` characters at which they begin) of each text; eos_token in a text is the one token 256."""

        def encode(parts: list[str], behind: bool) -> list[tuple[ArrayLike, ArrayLike, int]]:
            # A byte 10xxxxxx continues a character.
            rows = zip(self.encode_batch(parts), map(len, parts), strict=True)
            return [(ids, np.cumsum(ids & 0xC0 != 0x80) - 1, length) for ids, length in rows]

        return encode_around_tokens(texts, {token: [index] for token, index in self.added.items()}, encode)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without 256. Bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", errors="replace")

    def vocabulary(self) -> dict[int, str]:
        """The bytes, named as SentencePiece names its byte pieces."""
        return {byte: f"<0x{byte:02X}>" for byte in range(256)}


Tokenizer = SentencePieceTokenizer | ByteTokenizer | HuggingFaceTokenizer


def load_tokenizer(settings: TokenizerConfig) -> Tokenizer:
    """The tokenizer that `[tokenizer]` names, from its file.

    Raises:
        DataError: the file is missing or not of this `kind`.
    """
    if settings.kind == "bytes":
        return ByteTokenizer()
    if not settings.path:
        raise DataError(
            f"tokenizer.kind = {settings.kind!r} needs tokenizer.path", fix="set tokenizer.path to a tokenizer.json"
        )
    kind = SentencePieceTokenizer if settings.kind == "sentencepiece" else HuggingFaceTokenizer
    return kind(Path(os.path.expanduser(settings.path)), settings.bos)


def tokenizer_files(settings: TokenizerConfig, tokenizer: Tokenizer, start: Path | None) -> dict[str, Path]:
    """The files to export with a model's weights: name -> path.

    Args:
        start: folder of the checkpoint that training began from. Its files are taken if it has the same tokenizer.
    """
    if tokenizer.path is None:
        return {}
    name = MODEL_FILE if settings.kind == "sentencepiece" else JSON_FILE
    same = start and (start / name).is_file() and (start / name).read_bytes() == tokenizer.path.read_bytes()
    folders = (start if same else None, tokenizer.path.parent if settings.path else None)
    theirs, own = (
        {file: folder / file for file in COMPANIONS if (folder / file).is_file()} if folder else {}
        for folder in folders
    )
    if own.keys() & {*SPECIAL_FILES}:  # each folder's files are to be read together
        theirs = {file: path for file, path in theirs.items() if file not in SPECIAL_FILES}
    return {**theirs, **own, name: tokenizer.path}


def template_variables(settings: TokenizerConfig, start: Path | None) -> dict[str, str]:
    """What bos_token, eos_token and other names of special tokens are in a chat template.

    Args:
        start: folder of the checkpoint that training begins from. Its files give names if no file beside the tokenizer
            gives any.

    Raises:
        DataError: as load_tokenizer.
    """
    folder = Path(os.path.expanduser(settings.path)).parent if settings.path else None
    beside = read_tokenizer_files(folder).names
    if settings.kind == "huggingface" and "eos_token" in beside:
        return beside  # as the tokenizer would have it, which takes a second to read
    own = {"eos_token": END_NAME} if settings.trained else {**load_tokenizer(settings).special_tokens}
    return own if beside else read_tokenizer_files(start).names | own


def other_pieces(tokenizer: Tokenizer, other: Tokenizer) -> list[int]:
    """The ids that mean different text in two tokenizers. Added and special tokens may differ."""
    added = {*tokenizer.added.values(), *other.added.values()}
    ours, theirs = tokenizer.vocabulary(), other.vocabulary()

    def text(piece: str | None) -> str | None:
        # In Gemma's tokenizer.json a tab is a piece of its own, and in its tokenizer.model the byte's.
        byte = re.fullmatch("<0x([0-7][0-9A-F])>", piece or "")
        return chr(int(byte[1], 16)) if byte else piece

    ids = sorted((ours.keys() | theirs.keys()) - added)
    return [index for index in ids if text(ours.get(index)) != text(theirs.get(index))]


def vocabulary_size(settings: TokenizerConfig) -> int:
    """Number of token ids of the tokenizer's file, or of the one that will be trained on the corpus.

    Raises:
        DataError: as load_tokenizer.
    """
    return settings.vocab_size if settings.trained else load_tokenizer(settings).vocab_size


def use_one_thread(tokenizer: Tokenizer) -> None:
    """Tokenize on one core from now on: other processes have the others."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        tokenizer.threads = 1
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the package has no other switch, and reads it at each batch


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
