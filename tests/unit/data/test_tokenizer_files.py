"""The files beside a tokenizer, with transformers as the judge: special tokens by name, added tokens, the end token."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from tests.support.chats import write_llama_model
from tests.support.deep import deep_rows
from torchtitan_cp.config.sections import Tokenizer as TokenizerConfig
from torchtitan_cp.data.corpus.tokenizer import load_tokenizer, template_variables
from torchtitan_cp.data.errors import DataError

NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token")
# In the vocabulary: special, or as ordinary pieces. And texts that it does not have.
OWN, ORDINARY, NEW = ("<s>", "</s>", "<end>"), ("th", "re"), ("<|user|>", "<|user|>!", "[EOS]", "<pad>", "\u00e9<x>")
PLAIN = "PreTrainedTokenizerFast"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer of each kind in a folder of its own."""
    folder = tmp_path_factory.mktemp("own")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(OWN),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([Path(__file__).read_text("utf-8")], trainer)
    made.add_tokens(["<tool>"])  # no special one
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    model = write_llama_model(folder / "tokenizer.model", control_symbols=["<end>"])
    return {"huggingface": folder / "tokenizer.json", "sentencepiece": model}


def as_object(content: str, draw: random.Random, **flags: Any) -> dict[str, Any]:
    """A token as transformers writes it."""
    stripped = {name: draw.random() < 0.2 for name in ("lstrip", "rstrip")}
    return {"content": content, "single_word": False, "normalized": False, **stripped, **flags}


def write_drawn(folder: Path, source: Path, kind: str, draw: random.Random) -> None:
    """A tokenizer with files beside it that agree, disagree, stand alone or are missing."""
    plain = kind == "huggingface" or draw.random() < 0.5
    folder.mkdir()
    shutil.copy(source, folder)
    size = load_tokenizer(TokenizerConfig(kind, str(source))).vocab_size
    # Of a SentencePiece model this class, unlike LlamaTokenizer, seeks a normalized token before a longer one.
    novel = NEW[1:] if kind == "sentencepiece" and plain else NEW
    texts = draw.sample([*OWN, *ORDINARY, *novel], 6)
    config: dict[str, Any] = {"tokenizer_class": PLAIN if plain else "LlamaTokenizer"}
    config["legacy"] = False  # no space after a special token
    for name in draw.sample(NAMES, draw.randint(0, 4)):
        as_written = {**as_object(draw.choice(texts), draw), "__type": "AddedToken"}
        config[name] = draw.choice([as_written, as_written["content"], as_written["content"], None])
    new = draw.sample(novel, draw.randint(1, 3))
    if draw.random() < 0.5:
        chosen = [*new, *draw.sample(OWN, draw.randint(0, 2))] if kind == "huggingface" else new
        index_of = {text: size + position for position, text in enumerate(new)} | {t: i for i, t in enumerate(OWN)}
        config["added_tokens_decoder"] = {
            str(index_of[text]): as_object(text, draw, special=draw.random() < 0.5) for text in chosen
        }
    if draw.random() < 0.3 and kind == "huggingface":
        key = draw.choice(["additional_special_tokens", "extra_special_tokens"])
        config[key] = draw.sample(novel, 2)
    if draw.random() < 0.3:
        config["add_bos_token"] = draw.random() < 0.7
    if draw.random() < 0.85 or kind == "sentencepiece":
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if draw.random() < 0.6:
        special_map: dict[str, Any] = {}
        for name in draw.sample(NAMES, draw.randint(0, 4)):
            text = draw.choice(texts)
            special_map[name] = draw.choice([text, as_object(text, draw)])
        if draw.random() < 0.3:
            special_map["additional_special_tokens"] = draw.sample(novel, 2)
        (folder / "special_tokens_map.json").write_text(json.dumps(special_map))
    if draw.random() < 0.5:
        added = {text: size + position for position, text in enumerate(new)}
        (folder / "added_tokens.json").write_text(json.dumps(added))


def texts_of(theirs: Any, draw: random.Random) -> list[str]:
    """Every added token in the middle of words, at both ends, doubled, and among spaces."""
    tokens = sorted(theirs.get_added_vocab())
    return [
        *(f"the{token}re {token} end{token}{token}" for token in tokens),
        *(f"{token}  there" for token in tokens),
        "a" + "".join(draw.choice([*tokens, " the ", " re", "there\n"]) for _ in range(40)),
    ]


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
@deep_rows("seeds", [range(start, start + 25) for start in range(0, 500, 25)], default=[range(25)])
def test_tokens_are_those_of_transformers_on_the_same_files(
    tmp_path: Path, sources: dict[str, Path], kind: str, seeds: range
) -> None:
    for seed in seeds:
        draw, folder = random.Random(seed), tmp_path / str(seed)
        write_drawn(folder, sources[kind], kind, draw)
        theirs = AutoTokenizer.from_pretrained(folder)
        settings = TokenizerConfig(kind, str(folder / sources[kind].name))
        about = f"seed {seed}: {[path.read_text() for path in folder.glob('*_*.json')]}"
        if theirs.eos_token is None and not theirs.added_tokens_decoder[theirs.get_vocab()["</s>"]].special:
            with pytest.raises(DataError, match="has no end-of-text token: no file beside it names an eos_token"):
                load_tokenizer(settings)
            continue
        ours = load_tokenizer(settings)
        assert ours.special_tokens == {"eos_token": "</s>"} | theirs.special_tokens_map, about
        assert template_variables(settings, None) == ours.special_tokens, about
        if theirs.eos_token:
            assert (ours.eos_token, ours.eos_id) == (theirs.eos_token, theirs.eos_token_id), about
        assert {token.content: index for token, index in ours.added.items()} == theirs.get_added_vocab(), about
        assert ours.vocab_size == len(theirs), about
        texts = texts_of(theirs, draw)
        for text, (ids, _) in zip(texts, ours.encode_chat_batch(texts), strict=True):
            expected = theirs(text, add_special_tokens=False)["input_ids"]
            assert ids.tolist() == expected, f"{about} {text!r}"
            assert ours.decode(ids) == theirs.decode(expected, skip_special_tokens=True), f"{about} {text!r}"
        assert [*ours.bos_ids, *ours.encode_batch(["ab"])[0].tolist()] == theirs("ab")["input_ids"], about
        for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
            whole = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert ids.tolist() == whole, f"{about} {text!r}"
