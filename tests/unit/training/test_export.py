"""The tokenizer of an export, with transformers' AutoTokenizer as the judge."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from tests.support.chats import FORMS, plain, write_llama_model, write_templates, write_tokenizer
from tests.support.disks import failing_lists
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Config, Model
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.chat import ChatTemplate, find_chat_template
from torchtitan_cp.data.corpus.tokenizer import load_tokenizer
from torchtitan_cp.data.corpus.tokenizer_training import train_sentencepiece
from torchtitan_cp.training.export import start_exports
from torchtitan_cp.training.export import write_tokenizer as export_tokenizer

TEXTS = [
    *("def f(self):\n    return 'x'\n", "  two  leading ", "12345 67.8\n\n\tx", " ", "Why? It's"),
    "na\u00efve \u65e5\u672c\u8a9e \U0001f389 \ufb01",
]
KINDS: dict[str, dict[str, Any] | None] = {
    "tokenizer.json": None,
    "BPE as Llama 2's": {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "unigram": {"model_type": "unigram"},
    "BPE without prefix": {"model_type": "bpe", "add_dummy_prefix": False},
    "our own": {},
}


def settings_for(kind: str, folder: Path) -> TokenizerConfig:
    """A tokenizer of this kind without tokenizer_config.json."""
    options = KINDS[kind]
    if options is None:
        path = write_tokenizer(folder)
        (folder / "tokenizer_config.json").unlink()
        return TokenizerConfig(kind="huggingface", path=str(path))
    path, lines = folder / "its.model", Path(__file__).read_text("utf-8").splitlines() * 3
    folder.mkdir()
    if options:
        with path.open("wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=file,
                vocab_size=420,
                byte_fallback=True,
                hard_vocab_limit=False,
                minloglevel=2,
                **options,
            )
    else:
        train_sentencepiece(lines, 400, path)
    return TokenizerConfig(kind="sentencepiece", path=str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_text_as_training_did(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_for(kind, tmp_path / "its")
    tokenizer, out = load_tokenizer(settings), tmp_path / "out"
    for family in ("qwen3", "gemma3_text", "llama", "gpt_oss"):
        (out / family).mkdir(parents=True)
        (out / family / "config.json").write_text(json.dumps({"model_type": family}))
        export_tokenizer(Config(tokenizer=settings), tokenizer, None, 128, out / family)
        theirs = AutoTokenizer.from_pretrained(out / family)
        assert [theirs(text)["input_ids"] for text in TEXTS] == [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]
        assert (theirs.eos_token, theirs.eos_token_id) == (tokenizer.eos_token, tokenizer.eos_id)
        assert theirs.decode(theirs(TEXTS[0])["input_ids"]) == tokenizer.decode(tokenizer.encode_batch(TEXTS)[0])
    assert not caplog.records


@pytest.mark.parametrize("form", FORMS)
def test_transformers_loads_all_templates_of_the_tokenizer_or_the_one_that_was_given(form: str, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "its")
    stored = write_templates(path.parent, form, plain("chatml"), plain("qwen3"))
    write_tokenizer(path.parent, **stored)
    settings = TokenizerConfig(kind="huggingface", path=str(path))
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    for given in ("", str(tmp_path / "own.jinja")):
        data = Data(source="python-docstrings", chat_template=given)
        template, out = find_chat_template(data, settings, None), tmp_path / f"out{bool(given)}"
        out.mkdir()
        export_tokenizer(Config(tokenizer=settings, data=data), load_tokenizer(settings), template, 64, out)
        exported, own = (AutoTokenizer.from_pretrained(folder).chat_template for folder in (out, path.parent))
        assert exported == ("{{ messages }}" if given else own)
        assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())


def test_transformers_reads_conversations_as_training_did(tmp_path: Path) -> None:
    path = write_llama_model(tmp_path / "its.model", control_symbols=["[INST]", "[/INST]"])
    settings = TokenizerConfig(kind="sentencepiece", path=str(path))
    tokenizer, out = load_tokenizer(settings), tmp_path / "out"
    out.mkdir()
    config = Config(tokenizer=settings, data=Data(source="python-docstrings"))
    export_tokenizer(config, tokenizer, ChatTemplate("{{ messages }}"), 64, out)
    text = "<s>[INST]one  two[/INST]three</s>[INST] four [/INST]\n5</s>"
    [(ids, _)] = tokenizer.encode_chat_batch([text])
    assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] == ids.tolist()


def test_a_class_that_splits_text_otherwise_is_kept_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for("unigram", tmp_path / "its")
    (tmp_path / "its" / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "out").mkdir()
    export_tokenizer(Config(tokenizer=settings), load_tokenizer(settings), None, 128, tmp_path / "out")
    (record,) = caplog.records
    assert "reads text unlike" in record.getMessage()
    assert record.getMessage().endswith("it is read as LlamaTokenizer")
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    monkeypatch.setitem(sys.modules, "transformers", None)
    export_tokenizer(Config(tokenizer=settings), load_tokenizer(settings), None, 128, tmp_path / "out")
    assert "is not compared with" in caplog.records[-1].getMessage()
    assert "needs the package `transformers`" in caplog.records[-1].getMessage()


def test_a_tokenizer_takes_as_many_tokens_as_the_model_was_trained_with(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "its", model_max_length=256)
    settings = TokenizerConfig(kind="huggingface", path=str(path))
    for length in (128, 1024):
        (out := tmp_path / str(length)).mkdir()
        export_tokenizer(Config(tokenizer=settings), load_tokenizer(settings), None, length, out)
        assert AutoTokenizer.from_pretrained(out).model_max_length == max(256, length)


def test_an_export_that_cannot_look_for_checkpoints_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with failing_lists(lambda folder: folder.endswith("checkpoints")):
        start_exports(tmp_path, "float32", load_tokenizer(TokenizerConfig(kind="bytes")))(True)
    assert f"NO EXPORT: [Errno 13] Permission denied: '{tmp_path}/checkpoints'" in caplog.text


@pytest.mark.parametrize("conversations", [True, False])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"])
@pytest.mark.parametrize("kind", ["tokenizer.json", "BPE as Llama 2's", "our own"])
def test_special_and_added_tokens_are_exported_as_training_read_them(
    kind: str, place: str, conversations: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, folder = settings_for(kind, tmp_path / "its"), tmp_path / "its"
    size = load_tokenizer(settings).vocab_size
    if place == "tokenizer_config.json":
        listed = {size: "<|user|>", size + 1: "<|end|>"}
        flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
        tokens = {str(index): {"content": text, "special": True, **flags} for index, text in listed.items()}
        values: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
        (folder / place).write_text(json.dumps({**values, "added_tokens_decoder": tokens}))
    else:
        names = {"eos_token": "<|end|>", "bos_token": {"content": "<|user|>", "rstrip": False}}
        (folder / "special_tokens_map.json").write_text(json.dumps(names))
        if place == "added_tokens.json":
            (folder / place).write_text(json.dumps({"<|user|>": size, "<|end|>": size + 1, "<|tool|>": size + 2}))
    tokenizer, out = load_tokenizer(settings), tmp_path / "out"
    out.mkdir()
    data = Data(source="python-docstrings" if conversations else "text", path="" if conversations else str(folder))
    export_tokenizer(Config(tokenizer=settings, data=data), tokenizer, None, 128, out)
    theirs = AutoTokenizer.from_pretrained(out)
    # After conversations with such a model, only text that begins with a space is read otherwise.
    spaces = conversations and kind == "BPE as Llama 2's"
    assert ["e.g. '  two" in record.getMessage() for record in caplog.records] == [True] * spaces
    assert (theirs.eos_token, theirs.eos_token_id, len(theirs)) == ("<|end|>", tokenizer.eos_id, tokenizer.vocab_size)
    assert theirs.bos_token == (None if place == "tokenizer_config.json" else "<|user|>")
    assert theirs.get_added_vocab() == {token.content: index for token, index in tokenizer.added.items()}
    text = "a<|user|>What? <|user|><|end|>" if conversations or kind == "tokenizer.json" else "<|user|><|end|>"
    [(ids, _)] = tokenizer.encode_chat_batch([text])
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids.tolist()
    assert {theirs.convert_tokens_to_ids("<|user|>"), tokenizer.eos_id} <= {*ids.tolist()}


def test_an_added_token_that_transformers_reads_otherwise_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The legacy LlamaTokenizer puts a space after every special token, which plain text does not show."""
    (tmp_path / "its").mkdir()
    path = write_llama_model(tmp_path / "its" / "tokenizer.model", control_symbols=["[INST]"])
    for legacy in (False, True):
        values = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy}
        (tmp_path / "its" / "tokenizer_config.json").write_text(json.dumps(values))
        settings = TokenizerConfig(kind="sentencepiece", path=str(path))
        (out := tmp_path / str(legacy)).mkdir()
        config = Config(tokenizer=settings, data=Data(source="python-docstrings"))
        export_tokenizer(config, load_tokenizer(settings), None, 64, out)
        assert ("e.g. 'a<s>b <s> c': it is read as LlamaTokenizer" in caplog.text) == legacy


def test_the_end_token_of_training_is_exported_where_the_checkpoint_names_another(tmp_path: Path) -> None:
    """The tokenizer was copied without its files, so training guessed."""
    path = write_tokenizer(tmp_path / "hub", eos_token="<|im_end|>")
    (tmp_path / "hub" / "special_tokens_map.json").write_text('{"eos_token": "<|eot_id|>", "bos_token": "<s>"}')
    (tmp_path / "hub" / "config.json").write_text("{}")
    copied = Path(shutil.copy(path, tmp_path / "copied.json"))
    settings = TokenizerConfig(kind="huggingface", path=str(copied))
    (out := tmp_path / "out").mkdir()
    config = Config(tokenizer=settings, model=Model(hub_checkpoint=str(tmp_path / "hub")))
    export_tokenizer(config, load_tokenizer(settings), None, 64, out)
    theirs = AutoTokenizer.from_pretrained(out)
    assert (theirs.eos_token, theirs.bos_token) == ("</s>", "<s>")
