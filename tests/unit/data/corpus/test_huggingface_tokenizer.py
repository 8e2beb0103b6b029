"""Kinds of tokenizer.json beside byte-level BPE: what their vocabularies, merges and switches do to a document."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from tests.support.corpus_cache import contents, only
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.huggingface_tokenizer import HuggingFaceTokenizer
from torchtitan_cp.data.corpus.statistics import UNKNOWN
from torchtitan_cp.data.errors import DataError

SPECIAL = ["<unk>", "<s>", "</s>"]
SAMPLE = Path(__file__).read_text("utf-8").splitlines()


def unigram() -> Any:
    """As T5's or LLM-jp's: its pieces include the special tokens."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>")
    made.train_from_iterator(SAMPLE, trainer)
    return made


def word_level() -> Any:
    made = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.train_from_iterator(SAMPLE, trainers.WordLevelTrainer(special_tokens=SPECIAL))
    return made


def llama_2() -> Any:
    """Merges that lead to a special token, without a pre-tokenizer that would split its text."""
    pieces = [*SPECIAL, "<", "/", "s", ">", "\u2581", "</", "s>", *"abe"]
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.add_special_tokens(SPECIAL)
    return made


def save(made: Any, folder: Path, **config: Any) -> HuggingFaceTokenizer:
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>", **config}))
    return HuggingFaceTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("make", [unigram, word_level, llama_2])
def test_a_special_token_that_the_vocabulary_reads_is_only_read_in_conversations(tmp_path: Path, make: Any) -> None:
    made = make()
    tokenizer = save(made, tmp_path)
    for text in ("a </s> b", "a</s><s>", "</s>"):
        [plain] = tokenizer.encode_batch([text])
        assert not {1, 2} & set(plain.tolist())
        [(ids, _)] = tokenizer.encode_chat_batch([text])
        assert ids.tolist() == made.encode(text).ids
    others = ["a b", "be a", "b < / s >", "</", "a<"]
    assert [row.tolist() for row in tokenizer.encode_batch(others)] == [made.encode(text).ids for text in others]


def test_a_document_begins_with_bos_whatever_the_vocabulary_lacks(tmp_path: Path) -> None:
    vocabulary = {piece: index for index, piece in enumerate([*"ACGT", "<s>", "</s>"])}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.add_special_tokens(["<s>", "</s>"])
    ends = {"<s> $A": [4], "<s> $A </s>": [4], "$A </s>": [], "</s> $A </s>": [5], "<s> </s> $A": [4, 5]}
    for single, expected in ends.items():
        tokens = [("<s>", 4), ("</s>", 5)]
        made.post_processor = tokenizers.processors.TemplateProcessing(single, None, tokens)
        assert save(made, tmp_path).bos_ids == expected


def test_a_text_has_the_same_tokens_each_time_whatever_the_dropout(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(SAMPLE, trainer)
    steady = save(made, tmp_path)
    expected = [row.tolist() for row in steady.encode_batch(SAMPLE)]
    made.model.dropout = 0.5
    tokenizer = save(made, tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] == 0.5
    assert [row.tolist() for row in tokenizer.encode_batch(SAMPLE)] == expected
    assert tokenizer.fingerprint != steady.fingerprint


@pytest.mark.parametrize("make", [unigram, word_level, llama_2])
def test_text_that_a_tokenizer_does_not_know_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    tokenizer = save(make(), tmp_path)
    assert (tokenizer.unknown_id, tokenizer.lost) == (0, "")
    (tmp_path / "rows.jsonl").write_text('{"text": "a \\u6f22 b \\u00e9"}\n{"text": "a"}\n')
    data = Data(source="jsonl", path=str(tmp_path / "rows.jsonl"), cache_folder=str(tmp_path / "cache"))
    caplog.set_level("INFO")
    prepared = only(prepare(data, TokenizerConfig("huggingface", str(tokenizer.path))))
    unknown = sum(row.count(0) for store in (prepared.train, prepared.validation) for row in contents(store))
    assert prepared.statistics.skipped_records == {UNKNOWN: unknown}
    assert f"left out or cut: {unknown} x token for text that the tokenizer does not know" in caplog.text


def test_a_tokenizer_that_drops_what_it_does_not_know_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    letters = tokenizers.Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate("ab ")}, merges=[]))
    letters.add_special_tokens(["</s>"])
    few_bytes = tokenizers.Tokenizer(models.BPE())
    few_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    few_bytes.train_from_iterator(["ab"], trainers.BpeTrainer(special_tokens=["</s>"]))
    fallback = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "</s>": 1}, merges=[], byte_fallback=True))
    fallback.add_special_tokens(["</s>"])
    ending = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "</s>": 1}, merges=[], unk_token="</s>"))
    ending.add_special_tokens(["</s>"])
    (tmp_path / "rows.jsonl").write_text('{"text": "ab"}\n{"text": "b"}\n')
    dropped, ends = "drops {} that its vocabulary lacks, and has no", "ends a document at {} that its vocabulary lacks"
    for made, lost in (
        (letters, dropped.format("characters")),
        (few_bytes, dropped.format("bytes")),
        (fallback, dropped.format("characters")),
        (ending, ends.format("characters")),
    ):
        path = save(made, tmp_path).path
        caplog.clear()
        data = Data(source="jsonl", path=str(tmp_path / "rows.jsonl"), cache_folder=str(tmp_path / "cache"))
        prepare(data, TokenizerConfig("huggingface", str(path)))
        assert f"the tokenizer {path} {lost}" in caplog.text
        assert "\n  fix: give its model an unk_token of its own, or take another tokenizer" in caplog.text


def test_whole_alphabets_lose_nothing(tmp_path: Path) -> None:
    alphabet = {piece: index for index, piece in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["</s>"])
    assert save(made, tmp_path).lost == ""
    pieces = ["a", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.add_special_tokens(["</s>"])
    assert save(made, tmp_path).lost == ""


def test_a_model_that_refuses_unknown_text_is_named(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>"])
    tokenizer = save(made, tmp_path)
    assert tokenizer.encode_batch(["a a"])[0].tolist() == [0, 0]
    for encode in (tokenizer.encode_batch, tokenizer.encode_chat_batch):
        with pytest.raises(DataError, match=r"tokenizer.json cannot read a text .* Missing \[UNK\] token"):
            encode(["a b"])
