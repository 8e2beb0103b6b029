"""Tokenizers: text comes back as it went in, and a file that cannot serve is named."""

import io
import json
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaTokenizer

from tests.support.chats import write_llama_model
from tests.support.encoded import encode_all
from torchtitan_cp.config import UserError
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.added_tokens import AddedToken
from torchtitan_cp.data.corpus.documents import Corpus
from torchtitan_cp.data.corpus.encoding import learned_tokens
from torchtitan_cp.data.corpus.huggingface_tokenizer import HuggingFaceTokenizer
from torchtitan_cp.data.corpus.records import SkippedRecords
from torchtitan_cp.data.corpus.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    vocabulary_size,
)
from torchtitan_cp.data.corpus.tokenizer_training import train_sentencepiece

SAMPLE = [Path(sentencepiece.__file__).read_text(), Path(__file__).read_text()]
ODD_TEXTS = [
    "",
    " ",
    "  two  and   three   ",
    "\n\n\tdef f():\n\t\treturn 1  \n    \t \n",
    "\r\n\x00\x01\x7f\ufeff\u2028\u00a0",
    "emoji \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 and 漢字",
    "\u2581marks \u2581\u2581 and \u2585 \u2047",
    "</s><unk><s><0x0A><|endoftext|>",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    train_sentencepiece(iter(SAMPLE), 600, path)
    return path


@pytest.fixture(scope="module")
def json_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer.json with an end-of-text token, that asks for truncation and padding."""
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    byte_level(["<|endoftext|>", "<pad>"]).save(str(path))
    return path


def byte_level(special: list[str]) -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        SAMPLE, tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding()
    return tokenizer


@pytest.fixture(scope="module", params=["sentencepiece", "bytes", "huggingface"])
def tokenizer(request: pytest.FixtureRequest, model: Path, json_file: Path) -> Tokenizer:
    paths = {"sentencepiece": str(model), "bytes": "", "huggingface": str(json_file)}
    return load_tokenizer(TokenizerConfig(kind=request.param, path=paths[request.param]))


def refuse(**settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        vocabulary_size(TokenizerConfig(**settings))
    return str(caught.value)


def test_odd_texts_come_back_exactly(tokenizer: Tokenizer) -> None:
    rows = tokenizer.encode_batch(ODD_TEXTS)
    assert [tokenizer.decode(row) for row in rows] == ODD_TEXTS


@settings(deadline=None)
@given(st.lists(st.text(), max_size=4))
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, batch: list[str]) -> None:
    rows = tokenizer.encode_batch(batch)
    assert [tokenizer.decode(row) for row in rows] == batch
    assert all(row.dtype == np.int32 and row.ndim == 1 for row in rows)


def test_no_special_token_is_added_or_read_from_text_and_none_is_decoded(tokenizer: Tokenizer) -> None:
    rows = tokenizer.encode_batch([*ODD_TEXTS, *SAMPLE])
    assert all(tokenizer.eos_id not in row for row in rows)
    assert max(row.max() for row in rows if row.size) < tokenizer.vocab_size > tokenizer.eos_id
    end = np.array([tokenizer.eos_id])
    assert tokenizer.decode(np.concatenate([rows[-1], end])) == SAMPLE[-1]


def test_a_conversation_has_its_special_tokens_and_says_where_each_token_begins(tokenizer: Tokenizer) -> None:
    unspecial = [re.sub(r"</?s>|<pad>|<.endoftext.>|<unk>", "", text) for text in SAMPLE]
    for text in (*ODD_TEXTS[:-1], *unspecial):
        [(ids, starts)] = tokenizer.encode_chat_batch([text + tokenizer.eos_token + text])
        plain = tokenizer.encode_batch([text])[0]
        assert ids.tolist() == [*plain, tokenizer.eos_id, *plain]
        assert (ids.dtype, starts.dtype) == (np.int32, np.int64)
        assert starts[len(plain)] == len(text)
        assert (np.diff(starts) >= 0).all()
        inner = sorted(set(starts[: len(plain)].tolist()))
        for start, stop in pairwise([*inner, len(text)]):  # every character, and the tokens that hold it
            held = tokenizer.decode(plain[(starts[: len(plain)] == start)])
            assert held == text[start:stop]


def test_a_conversation_has_the_tokens_that_transformers_reads_from_the_same_sentencepiece_model(
    tmp_path: Path,
) -> None:
    """As of Llama 2 and Mistral: control pieces are read, and only the beginning of a text gets a space of its own."""
    path = write_llama_model(tmp_path / "tokenizer.model", control_symbols=["[INST]", "[/INST]"])
    ours, theirs = SentencePieceTokenizer(path), LlamaTokenizer.from_pretrained(tmp_path)
    texts = [
        "<s>[INST]one two[/INST]three</s>[INST] four [/INST]\n5\u2581 6</s>",
        "<s> [INST] one </s><s>two",
        "one</s>two",
    ]
    for text, (ids, starts) in zip(texts, ours.encode_chat_batch(texts), strict=True):
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        instruction = ours.added[AddedToken("[INST]", special=True)]
        assert [text[start:].startswith("[INST]") for start in starts] == (ids == instruction).tolist()
    [plain] = ours.encode_batch([texts[0]])
    assert not set(plain.tolist()) & set(ours.added.values())


def test_a_user_defined_piece_that_a_file_makes_special_is_only_read_in_conversations(tmp_path: Path) -> None:
    """As Gemma's <start_of_turn>, which its tokenizer.model reads from any text."""
    path = write_llama_model(tmp_path / "tokenizer.model", user_defined_symbols=["<turn>", "<tool>"])
    before = SentencePieceTokenizer(path)
    config = {"eos_token": "</s>", "additional_special_tokens": ["<turn>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = SentencePieceTokenizer(path)
    [turn] = (index for token, index in tokenizer.added.items() if token.content == "<turn>")
    texts = ["a<turn>b", "<turn>", "<tool><turn> <turn></s>", "<tur"]
    plain, earlier = (each.encode_batch(texts) for each in (tokenizer, before))
    assert [turn in row for row in earlier] == [True, True, True, False]
    assert not any(turn in row for row in plain)
    assert [tokenizer.decode(row) for row in plain] == texts
    assert plain[2][1] == earlier[2][1]  # <tool>, which no file makes special
    assert [row[0].tolist().count(turn) for row in tokenizer.encode_chat_batch(texts)] == [1, 1, 2, 0]
    assert tokenizer.fingerprint != before.fingerprint


def test_characters_that_a_model_drops_belong_to_the_token_after_them(tmp_path: Path) -> None:
    """SentencePiece's own defaults drop spaces at the edges of a text and of what lies between special tokens."""
    options = {"remove_extra_whitespaces": True, "control_symbols": ["[I]", "[/I]"]}
    tokenizer = SentencePieceTokenizer(write_llama_model(tmp_path / "tokenizer.model", **options))
    text = "  [I]  the  [/I] the the </s> "
    [(ids, starts)] = tokenizer.encode_chat_batch([text])
    names = {index: token.content for token, index in tokenizer.added.items()}
    special = {
        names[token]: start for token, start in zip(ids.tolist(), starts.tolist(), strict=True) if token in names
    }
    assert special == {"[I]": 0, "[/I]": text.index("  [/I]"), "</s>": text.index(" </s>")}
    for start, stop in ((0, len(text)), (text.index("[/I]") + 4, len(text)), (text.index(" </s>"), len(text))):
        mask = learned_tokens(starts, [(start, stop)])
        assert mask.tolist() == [begin >= start for begin in starts]


def test_a_batch_gives_what_each_text_alone_gives(tokenizer: Tokenizer) -> None:
    batch = [text * 20 for text in ODD_TEXTS]
    for text, row in zip(batch, tokenizer.encode_batch(batch), strict=True):
        np.testing.assert_array_equal(row, tokenizer.encode_batch([text])[0])


def test_fingerprints_tell_tokenizers_apart(model: Path, json_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.model"
    train_sentencepiece(iter(SAMPLE), 500, other)
    settings = [("sentencepiece", model), ("sentencepiece", other), ("huggingface", json_file), ("bytes", "")]
    assert len({load_tokenizer(TokenizerConfig(kind, str(path))).fingerprint for kind, path in settings}) == 4


def test_the_size_of_a_tokenizer_is_known_before_the_corpus_is_read(
    model: Path, json_file: Path, tokenizer: Tokenizer
) -> None:
    paths = {SentencePieceTokenizer: model, HuggingFaceTokenizer: json_file}
    kinds = {SentencePieceTokenizer: "sentencepiece", HuggingFaceTokenizer: "huggingface", ByteTokenizer: "bytes"}
    chosen = TokenizerConfig(kind=kinds[type(tokenizer)], path=str(paths.get(type(tokenizer), "")))
    assert vocabulary_size(chosen) == tokenizer.vocab_size
    assert vocabulary_size(TokenizerConfig(vocab_size=777)) == 777


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_a_file_that_is_missing_or_no_model_is_named(tmp_path: Path, kind: str) -> None:
    missing = refuse(kind=kind, path=str(tmp_path / "gone"))
    assert f"tokenizer.path = '{tmp_path}/gone' cannot be read: No such file or directory" in missing
    assert "fix: give the path of a model file" in missing
    for content in (b"no model", b""):
        (tmp_path / "bad").write_bytes(content)
        bad = refuse(kind=kind, path=str(tmp_path / "bad"))
        assert f"tokenizer.path = '{tmp_path}/bad' is not a" in bad
        assert "fix: give another file, or set tokenizer.kind" in bad


def test_a_path_and_a_kind_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    assert "'~nobody-here' cannot be read" in refuse(kind="huggingface", path="~nobody-here")
    assert "tokenizer.kind = 'huggingface' needs tokenizer.path\n  fix: set" in refuse(kind="huggingface")


def test_a_sentencepiece_model_without_an_end_token_is_refused(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world"] * 5),
        model_writer=model,
        vocab_size=20,
        eos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "m").write_bytes(model.getvalue())
    message = refuse(path=str(tmp_path / "m"))
    assert "has no end-of-text token" in message
    assert "fix: name one as eos_token in a tokenizer_config.json beside it, train it with eos_id >= 0" in message


def test_a_tokenizer_json_without_an_end_token_is_refused(tmp_path: Path) -> None:
    byte_level(["<pad>"]).save(str(tmp_path / "t.json"))
    message = refuse(kind="huggingface", path=str(tmp_path / "t.json"))
    assert "no file beside it names an eos_token" in message
    assert "none of </s>, <eos>, <|endoftext|>, <|end_of_text|>, " in message
    assert "fix: name it as eos_token in a tokenizer_config.json beside it" in message


@pytest.mark.parametrize("end", ["<eos>", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"])
def test_the_text_of_an_html_tag_is_not_taken_for_the_end_token(tmp_path: Path, end: str) -> None:
    """As in Gemma's vocabulary: `</s>` is a token, and no special one."""
    made = byte_level([end])
    made.add_tokens(["</s>"])
    made.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(TokenizerConfig(kind="huggingface", path=str(tmp_path / "t.json")))
    assert (tokenizer.eos_token, tokenizer.eos_id) == (end, made.token_to_id(end))
    [ids] = tokenizer.encode_batch(["a</s>b" + end])
    assert tokenizer.eos_id not in ids


def test_a_missing_package_is_named_with_the_way_to_install_it(
    json_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = refuse(kind="huggingface", path=str(json_file))
    assert "needs the package `tokenizers`, which is not installed" in message
    assert f"fix: {sys.executable} -m pip install 'torchtitan-cp[hub]'" in message


def opening(path: Path, **settings: Any) -> list[int]:
    kind = "sentencepiece" if path.suffix == ".model" else "huggingface"
    return list(load_tokenizer(TokenizerConfig(kind=kind, path=str(path), **settings)).bos_ids)


def test_a_document_begins_with_what_transformers_puts_before_a_text(tmp_path: Path, model: Path) -> None:
    made, config = byte_level(["<eos>", "<bos>", "<other>"]), tmp_path / "tokenizer_config.json"
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    assert opening(path) == []
    made.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A <eos>", None, [("<bos>", 1), ("<eos>", 0)])
    made.save(str(path))
    assert opening(path) == [1]
    assert opening(path, bos=False) == []
    fingerprints = {HuggingFaceTokenizer(path, bos).fingerprint for bos in (True, False)}
    assert len(fingerprints) == 2
    for values in ({"add_bos_token": False, "bos_token": "<bos>"}, {"add_bos_token": True, "bos_token": "<other>"}):
        config.write_text(json.dumps({**values, "tokenizer_class": "PreTrainedTokenizerFast"}))
        assert opening(path) == AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"][:1] == [1]
    piece = Path(shutil.copy(model, tmp_path))
    config.unlink()
    assert opening(piece) == []
    for values, ids in (
        ({"add_bos_token": True, "bos_token": {"content": "</s>"}}, [SentencePieceTokenizer(piece).eos_id]),
        ({"add_bos_token": False, "bos_token": "</s>"}, []),
        ({"add_bos_token": True, "bos_token": "<new>"}, [SentencePieceTokenizer(piece).vocab_size]),
        ({"add_bos_token": True}, []),
    ):
        config.write_text(json.dumps(values))
        assert opening(piece) == ids


@pytest.mark.parametrize("steps", ["TemplateProcessing", "Sequence", "no BOS", "none"])
def test_a_sentencepiece_model_begins_documents_as_the_tokenizer_json_beside_it(tmp_path: Path, steps: str) -> None:
    """As of TinyLlama, whose tokenizer_config.json has no add_bos_token: transformers reads its tokenizer.json."""
    path = write_llama_model(tmp_path / "tokenizer.model")
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = LlamaTokenizer.from_pretrained(tmp_path).backend_tokenizer
    processors = tokenizers.processors
    bos = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    made.post_processor = {
        "TemplateProcessing": bos,
        "Sequence": processors.Sequence([processors.ByteLevel(), bos]),
        "no BOS": processors.TemplateProcessing("$A </s>", None, [("</s>", 2)]),
        "none": None,
    }[steps]
    made.save(str(tmp_path / "tokenizer.json"))
    expected = [1] if steps in ("TemplateProcessing", "Sequence") else []
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("a")["input_ids"][:1] == [*expected, *theirs("a", add_special_tokens=False)["input_ids"]][:1]
    assert opening(path) == expected
    assert opening(path, bos=False) == []
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": False}))
    assert opening(path) == []


def test_text_begins_with_bos_and_ids_of_a_corpus_stay_as_they_are(tmp_path: Path) -> None:
    made = byte_level(["<eos>", "<bos>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<bos> $A", None, [("<bos>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "rows.jsonl").write_text('{"text": "one", "ids": [5, 6]}\n{"text": "two", "ids": [7]}\n')
    of_text, of_ids = (
        [ids.tolist() for _, ids, _ in encode_all(Corpus(data).documents(SkippedRecords()), tokenizer, data)]
        for data in (Data(source="jsonl", path=str(tmp_path), **keys) for keys in ({}, {"token_field": "ids"}))
    )
    assert [row[0] for row in of_text] == [1, 1]
    assert [row.count(1) for row in of_text] == [1, 1]
    assert of_ids == [[5, 6], [7]]
