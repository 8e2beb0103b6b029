"""Text to tokens and back, by SentencePiece, by bytes or by a Hugging Face tokenizer.json.

For a run without a tokenizer, one is trained on the corpus: byte-pair encoding by SentencePiece.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.sections import MIN_PIECES
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.store import read_json, replace_file
from torchtitan_cp.data.errors import DataError

END_NAME = "</s>"  # unless a file names another
DEEPSEEK_END_NAME = "<\uff5cend\u2581of\u2581sentence\uff5c>"
TURN_END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>")
# The first of these that a tokenizer has ends a document. Source: the tokenizer.json of released checkpoints.
END_NAMES = (END_NAME, "<eos>", "<|endoftext|>", "<|end_of_text|>", DEEPSEEK_END_NAME, "<EOS_TOKEN>", *TURN_END_NAMES)
SPACE_MARK = "\u2581"
NO_PREFIX = b"\x1a\x02\x18\x00"  # after a SentencePiece model: normalizer_spec { add_dummy_prefix: false }, in protobuf
SAMPLE_CHARACTERS = 32 << 20
LINE_CHARACTERS = 1000  # at 4 bytes each below SentencePiece's max_sentence_length; it drops longer lines
# Files that transformers writes with a tokenizer.
COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt"),
)


class SentencePieceTokenizer:
    """A SentencePiece model file. Its threads are C++ threads that run without Python's lock.

    Args:
        path: the model.
        bos: whether documents begin with a BOS token, if a tokenizer_config.json beside the file says so.

    Attributes:
        vocab_size: V; every id is below it.
        bos_ids: ids that begin a document. `encode_batch` never returns them.
        eos_id: the token that ends a document. `encode_batch` never returns it.
        eos_token: how a chat template writes that token.
        fingerprint: different for every tokenizer.
        path: its file; None if it has none.
        spaces: "   a" as the model normalizes it.

    Raises:
        DataError: the file holds no model, or one without an end-of-text token.
    """

    def __init__(self, path: Path, bos: bool = True) -> None:
        model = _read_file(path)
        self.path: Path | None = path
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size: int = self._processor.vocab_size()
        except (RuntimeError, OSError) as error:
            raise _not_a_model(path, "a SentencePiece model", error) from error
        if not self.vocab_size:
            raise _not_a_model(path, "a SentencePiece model", "it is empty")
        self.eos_id: int = self._processor.eos_id()
        if self.eos_id < 0:
            raise DataError(
                f"the SentencePiece model {path} has no end-of-text token, which ends each document",
                fix="train it with eos_id >= 0, or leave tokenizer.path out to train one on the corpus",
            )
        self.eos_token: str = self._processor.id_to_piece(self.eos_id)
        self.spaces: str = self._processor.normalize("   a")
        self.bos_ids = self._find_bos(read_json(path.parent / "tokenizer_config.json") or {}) if bos else []
        self.fingerprint = _fingerprint(model, self.bos_ids)
        self._threads = usable_cores()
        self._marks = self._find_marks()

    def _find_bos(self, settings: Mapping[str, Any]) -> list[int]:
        """What transformers' LlamaTokenizer puts before a text, as its tokenizer_config.json says."""
        name = settings.get("bos_token") or "<s>"
        name = name.get("content", "") if isinstance(name, dict) else name
        token = self._processor.piece_to_id(name) if settings.get("add_bos_token") is True else -1
        return [token] if token >= 0 and self._processor.id_to_piece(token) == name else []

    def _find_marks(self) -> dict[str, list[int]]:
        """U+2581 and the byte tokens that spell it; empty if the model is not lossless anyway.

        SentencePiece writes a space as U+2581, and would decode a U+2581 that a text contains as a space.
        """
        ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        adds_prefix = self._processor.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        has_bytes = all(self._processor.is_byte(token) for token in ids)
        return {SPACE_MARK: ids} if has_bytes and not adds_prefix else {}

    @cached_property
    def _special(self) -> dict[str, list[int]]:
        """The control pieces and the end-of-text token, which need not be one, each with its id."""
        control = filter(self._processor.is_control, range(self.vocab_size))
        return {self._processor.id_to_piece(token): [token] for token in (self.eos_id, *control)}

    @cached_property
    def _without_prefix(self) -> Any:
        """The same model, but it adds no space before a text."""
        return sentencepiece.SentencePieceProcessor(model_proto=self._processor.serialized_model_proto() + NO_PREFIX)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, `[tokens]` int32, without special tokens, on all usable cores."""
        rows = self._processor.encode(list(texts), num_threads=self._threads)
        for index, text in enumerate(texts):
            if self._marks and SPACE_MARK in text:
                [(rows[index], _)] = _encode_parts([text], self._marks, self._encode_with_starts)
        return [np.asarray(row, dtype=np.int32) for row in rows]

    def encode_chat_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens of conversations as a chat template writes them: special tokens are read from the text.

        For `sentencepiece` these are the control pieces, for `bytes` it is eos_token. No token is added, and
        `sentencepiece` adds no space after a special token. Runs on all usable cores.

        Returns:
            for each text its token ids, `[n]` int32, and the character at which each begins, `[n]` int64.
        """
        return _encode_parts(texts, {**self._special, **self._marks}, self._encode_with_starts)

    def _encode_with_starts(self, parts: list[str], behind: bool) -> list[tuple[Any, Any]]:
        processor = self._without_prefix if behind else self._processor
        rows = processor.encode(parts, return_type="offset_mapping", num_threads=self._threads)
        return [(row["ids"], [start for start, _ in row["offsets"]]) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._processor.decode([int(token) for token in ids])


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, and 256 to end a document."""

    path: Path | None = None
    vocab_size, eos_id, eos_token, fingerprint = 257, 256, END_NAME, "bytes"
    bos_ids: Sequence[int] = ()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See SentencePieceTokenizer."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def encode_chat_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """See SentencePieceTokenizer."""

        def encode(parts: list[str], behind: bool) -> list[tuple[Any, Any]]:
            # A byte 10xxxxxx continues a character.
            return [(ids, np.cumsum(ids & 0xC0 != 0x80) - 1) for ids in self.encode_batch(parts)]

        return _encode_parts(texts, {self.eos_token: [self.eos_id]}, encode)

    def decode(self, ids: Iterable[int]) -> str:
        """See SentencePieceTokenizer. Bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, read by the `tokenizers` package and its Rust threads.

    Args:
        path: the tokenizer.json.
        bos: whether documents begin with what its post-processor puts before a text. As in transformers,
            tokenizer_config.json has no say in this.

    Raises:
        DataError: the package is missing, or the file is not a tokenizer.json with an end-of-text token.
    """

    def __init__(self, path: Path, bos: bool = True) -> None:
        content = _read_file(path)
        self.path: Path | None = path
        library = import_extra("tokenizers", extra="hub", needed_by="tokenizer.kind = 'huggingface'")
        try:
            self._tokenizer = library.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the package raises bare Exception
            raise _not_a_model(path, "a tokenizer.json", error) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "</s>" written in a document does not end it
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        # Special ones first: a vocabulary may hold the text "</s>" too, as Gemma's does for HTML.
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        found = sorted((name for name in END_NAMES if name in ids), key=lambda name: name not in special)
        if not found:
            raise DataError(
                f"the tokenizer {path} has no end-of-text token: none of {', '.join(END_NAMES)}",
                fix="add one of them to its vocabulary",
            )
        self.eos_id, self.eos_token = ids[found[0]], found[0]
        whole, text = (self._tokenizer.encode("a", add_special_tokens=add).ids for add in (True, False))
        before: list[int] = next((whole[:at] for at in range(len(whole)) if whole[at : at + len(text)] == text), [])
        self.bos_ids = before if bos else []
        self.fingerprint = _fingerprint(content + self.eos_token.encode(), self.bos_ids)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """See SentencePieceTokenizer."""
        rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(row.ids, dtype=np.int32) for row in rows]

    def encode_chat_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """See SentencePieceTokenizer. Characters in no token, such as spaces, belong to the token after them."""
        self._tokenizer.encode_special_tokens = False
        rows = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        self._tokenizer.encode_special_tokens = True

        def starts(row: Any) -> np.ndarray:
            offsets = np.fromiter(chain.from_iterable(row.offsets), dtype=np.int64)
            return np.minimum(offsets[::2], np.append(0, offsets[1::2])[:-1])

        return [(np.asarray(row.ids, dtype=np.int32), starts(row)) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        """See SentencePieceTokenizer."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)


def _fingerprint(content: bytes, bos_ids: list[int]) -> str:
    return hashlib.sha256(content + f"bos {bos_ids}".encode() * bool(bos_ids)).hexdigest()


def _encode_parts(
    texts: Sequence[str], special: Mapping[str, list[int]], encode: Callable[[list[str], bool], list[tuple[Any, Any]]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """As encode_chat_batch.

    Args:
        special: ids of special tokens.
        encode: (parts of text between them, whether they follow one) -> ids and starts of each part.
    """
    pattern = re.compile("(" + "|".join(map(re.escape, special)) + ")")
    split = [pattern.split(text) for text in texts]
    first = iter(encode([parts[0] for parts in split], False))
    later = iter(encode([part for parts in split for part in parts[2::2]], True))

    def joined(parts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, starts, start = [], [], 0
        for index, part in enumerate(parts):
            tokens, begins = (special[part], [0] * len(special[part])) if index % 2 else next(later if index else first)
            ids.append(np.asarray(tokens, dtype=np.int32))
            starts.append(np.asarray(begins, dtype=np.int64) + start)
            start += len(part)
        return np.concatenate(ids), np.concatenate(starts)

    return [joined(parts) for parts in split]


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
    name = "tokenizer.model" if settings.kind == "sentencepiece" else "tokenizer.json"
    folders = [tokenizer.path.parent] if settings.path else []
    if start and (start / name).is_file() and (start / name).read_bytes() == tokenizer.path.read_bytes():
        folders.append(start)
    companions = {file: folder / file for folder in folders for file in COMPANIONS if (folder / file).is_file()}
    return {**companions, name: tokenizer.path}


def vocabulary_size(settings: TokenizerConfig) -> int:
    """Number of token ids of the tokenizer's file, or of the one that will be trained on the corpus.

    Raises:
        DataError: as load_tokenizer.
    """
    return settings.vocab_size if settings.trained else load_tokenizer(settings).vocab_size


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"tokenizer.path = {str(path)!r} cannot be read: {error.strerror}", fix="give the path of a model file"
        ) from error


def _not_a_model(path: Path, expected: str, reason: object) -> DataError:
    return DataError(
        f"tokenizer.path = {str(path)!r} is not {expected}: {reason}",
        fix="give another file, or set tokenizer.kind to what it is (sentencepiece or huggingface)",
    )


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Train a vocabulary and write it as a lossless SentencePiece model.

    Unseen characters become bytes, whitespace is kept as it is, and a newline or tab is a piece of its own, so decoding
    returns the exact text. The same texts give the same file.
    Source: Sennrich et al. 2016 (arXiv:1508.07909); Kudo and Richardson 2018 (arXiv:1808.06226).

    Args:
        texts: to train on; of a large corpus an evenly spread sample of its lines is used.
        vocab_size: V, with the 256 bytes and the end-of-text token.
        path: the model file, written whole or not at all.

    Raises:
        DataError: the texts are too few or empty, or V is less than their number of characters.
    """
    model = io.BytesIO()
    lines = sample_lines(texts, SAMPLE_CHARACTERS)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,  # it is written into the model file; byte-pair training has one thread anyway
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explain(str(error), vocab_size) from error
    replace_file(path, model.getvalue())


def _explain(message: str, vocab_size: int) -> DataError:
    """The error for a message of SentencePiece."""
    if most := re.search(r"too high.*<= (\d+)", message):
        return DataError(
            f"the corpus is too small for a tokenizer of tokenizer.vocab_size = {vocab_size} pieces",
            fix=(f"set tokenizer.vocab_size to at most {most[1]}, " if int(most[1]) >= MIN_PIECES else "")
            + "give more text, or set tokenizer.kind = 'bytes'",
        )
    if least := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return DataError(
            f"tokenizer.vocab_size = {vocab_size} is less than the number of characters in the corpus",
            fix=f"set tokenizer.vocab_size to {int(least[1]) + 1} or more",
        )
    if "sentences_.empty()" in message:
        return DataError("the corpus holds only whitespace: no tokenizer can be trained on it", fix="check data.path")
    return DataError(f"SentencePiece could not train a tokenizer: {message}", fix="give a model with tokenizer.path")


def sample_lines(texts: Iterable[str], most_characters: int) -> list[str]:
    """An evenly spread sample of the non-blank lines.

    Every n-th line is kept; when the kept lines exceed the limit, every other one is dropped and n doubles. So the size
    of the corpus need not be known, and memory holds no more than the limit.

    Args:
        most_characters: of all lines returned; at least one line is returned.
    """
    kept, characters, stride = list[str](), 0, 1
    for index, line in enumerate(_lines(texts)):
        if index % stride:
            continue
        kept.append(line)
        characters += len(line)
        while characters > most_characters and len(kept) > 1:
            kept, stride = kept[::2], stride * 2
            characters = sum(map(len, kept))
    return kept


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for line in chain.from_iterable(text.split("\n") for text in texts):
        if line and not line.isspace():
            yield from (line[start : start + LINE_CHARACTERS] for start in range(0, len(line), LINE_CHARACTERS))
