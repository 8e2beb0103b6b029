"""A Hugging Face tokenizer.json, read by the package `tokenizers`."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import numpy as np

from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.data.corpus.added_tokens import AddedToken, token_starts
from torchtitan_cp.data.corpus.tokenizer_files import (
    CONFIG_FILE,
    fingerprint_of,
    not_a_model,
    read_model,
    read_tokenizer_files,
)
from torchtitan_cp.data.errors import DataError

DEEPSEEK_END_NAME = "<\uff5cend\u2581of\u2581sentence\uff5c>"
TURN_END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>")
# Where no file names the token that ends a document, it is the first of these that is a special token of the tokenizer.
# Source: the tokenizer.json of released checkpoints.
END_NAMES = ("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", DEEPSEEK_END_NAME, "<EOS_TOKEN>", *TURN_END_NAMES)
RARE = "\U0010fffe"  # a character that no vocabulary has
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that no text contains


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
        content = read_model(path)
        self.path: Path | None = path
        library = import_extra("tokenizers", extra="hub", needed_by="tokenizer.kind = 'huggingface'")
        try:
            self._tokenizer = library.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the package raises bare Exception
            raise not_a_model(path, "a tokenizer.json", error) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if had_dropout := bool(getattr(self._tokenizer.model, "dropout", None)):  # each pass would give other tokens
            self._tokenizer.model.dropout = None
        self._tokenizer.encode_special_tokens = True  # "</s>" written in a document does not end it
        files, own = read_tokenizer_files(path.parent), self._read_added()
        tokens = files.added(own, {})
        self._tokenizer.add_tokens([library.AddedToken(**asdict(token)) for token in tokens])
        by_id = self._read_added()
        self.added = {token: index for index, token in by_id.items()}
        known = self._cut_known(library)
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        special = {token.content for token in self.added if token.special}
        guess = next((name for name in END_NAMES if name in special), None)
        eos_token = files.names.get("eos_token", guess)
        if eos_token is None:
            raise DataError(
                f"the tokenizer {path} has no end-of-text token: no file beside it names an eos_token, and its special "
                f"tokens have none of {', '.join(END_NAMES)}",
                fix=f"name it as eos_token in a {CONFIG_FILE} beside it",
            )
        self.eos_id, self.eos_token = self._tokenizer.token_to_id(eos_token), eos_token
        self.special_tokens = {"eos_token": eos_token, **files.names}
        self.bos_ids = self._read_opening() if bos else []
        self.unknown_id, self.lost = self._find_unknown(library)
        changed = repr(sorted(by_id.items())) if by_id != own else ""
        changed += "no dropout" * had_dropout + "".join(f"cut {token.content}" for token in known)
        self.fingerprint = fingerprint_of(content + (eos_token + changed).encode(), self.bos_ids)

    def _read_added(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        flags = [field.name for field in fields(AddedToken)]
        added = self._tokenizer.get_added_tokens_decoder()
        return {index: AddedToken(**{flag: getattr(token, flag) for flag in flags}) for index, token in added.items()}

    def _cut_known(self, library: ModuleType) -> list[AddedToken]:
        """Let plain text be cut inside the texts of special tokens that the vocabulary itself reads; returns these.

        Unigram and WordLevel read every token of their vocabulary, and BPE those that its merges make.
        """
        special = sorted((token for token in self.added if token.special), key=lambda token: self.added[token])
        known = [token for token in special if any(self._reads(token, text) for text in token.in_texts)]
        if known:
            pattern = library.Regex("|".join(token.first_character_pattern for token in known))
            split, before = library.pre_tokenizers.Split(pattern, "isolated"), self._tokenizer.pre_tokenizer
            self._tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([before, split] if before else [split])
        return known

    def _reads(self, token: AddedToken, text: str) -> bool:
        """Whether plain text gives the token; False if the model refuses the text for what it does not know."""
        with suppress(Exception):
            return self.added[token] in self._tokenizer.encode(text, add_special_tokens=False).ids
        return False

    def _read_opening(self) -> list[int]:
        """The ids that the post-processor puts before a text. The text is a token that every vocabulary has."""
        self._tokenizer.encode_special_tokens = False
        found = self._tokenizer.encode(self.eos_token)
        self._tokenizer.encode_special_tokens = True
        pairs = takewhile(lambda pair: pair[1] is None, zip(found.ids, found.sequence_ids, strict=True))
        return [index for index, _ in pairs]

    def _find_unknown(self, library: ModuleType) -> tuple[int | None, str]:
        """`unknown_id` and `lost`: BPE without an unknown token drops what its vocabulary lacks."""
        model, steps = self._tokenizer.model, f"{self._tokenizer.normalizer!r} {self._tokenizer.pre_tokenizer!r}"
        probes, lacks = [RARE, *map(chr, range(0x800))], "characters"
        if "ByteLevel" in steps:  # which writes most bytes as the character with their number
            alphabet, lacks = library.pre_tokenizers.ByteLevel.alphabet(), "bytes"
            probes = [character for character in alphabet if ord(character) not in NEVER_IN_UTF8]
        try:
            found = [model.tokenize(probe) for probe in probes]
        except Exception:  # some models refuse what they do not know; see encode_batch
            return None, ""
        unknown = self._tokenizer.token_to_id(getattr(model, "unk_token", None) or "")
        if type(model) is library.models.Unigram and len(found[0]) == 1:
            unknown = found[0][0].id
        if not all(found):
            return unknown, f"drops {lacks} that its vocabulary lacks, and has no token for the unknown"
        if unknown == self.eos_id and any(token.id == unknown for tokens in found for token in tokens):
            return unknown, f"ends a document at {lacks} that its vocabulary lacks: its unknown token is the end token"
        return unknown, ""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, `[tokens]` int32, on all cores. A special token's text is split like any other.

        Raises:
            DataError: a text has something that the vocabulary lacks, and there is no token for that.
        """
        with self._naming_errors():
            rows = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(row.ids, dtype=np.int32) for row in rows]

    def encode_chat_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(`[n]` ids, `[n]` characters at which they begin) of each text, with special tokens read from the text.

        Characters in no token, such as spaces, belong to the token after them. Raises as encode_batch.
        """
        self._tokenizer.encode_special_tokens = False
        with self._naming_errors():
            rows = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        self._tokenizer.encode_special_tokens = True
        return [(np.asarray(row.ids, dtype=np.int32), token_starts(row.offsets)) for row in rows]

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the package raises bare Exception
            raise DataError(
                f"the tokenizer {self.path} cannot read a text of the corpus: {error}",
                fix="give its model an unk_token that its vocabulary has, or take another tokenizer",
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def vocabulary(self) -> dict[int, str]:
        """The pieces by id, without special and added tokens."""
        added = set(self.added.values())
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        return {index: piece for piece, index in vocabulary.items() if index not in added}
