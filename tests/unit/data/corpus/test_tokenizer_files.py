"""The files beside a tokenizer, with transformers as the judge: special tokens by name, added tokens, the end token."""

import hashlib
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
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer, load_tokenizer, other_pieces, template_variables
from torchtitan_cp.data.corpus.tokenizer_files import name_tokenizer_file
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


# End tokens of families that are trained here, as their tokenizer_config.json names them.
ENDS = {
    "Apertus, ERNIE 4.5, Mistral": "</s>",
    "Cohere": "<|END_OF_TURN_TOKEN|>",
    "DeepSeek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "dots1": "<|endofresponse|>",
    "EXAONE 4": "[|endofturn|]",
    "Gemma": "<eos>",
    "GLM, OLMo, Qwen": "<|endoftext|>",
    "gpt-oss": "<|return|>",
    "Granite, Llama 3": "<|end_of_text|>",
    "HyperCLOVA X": "<|endofturn|>",
    "Kimi": "[EOS]",
    "LongCat": "</longcat_s>",
    "MiniMax M2": "[e~[",
    "NanoChat": "<|assistant_end|>",
    "Phi 4, SmolLM 3": "<|im_end|>",
    "Seed-OSS": "<seed:eos>",
}


def write_json_tokenizer(folder: Path, source: Path, special: list[str], **config: Any) -> Path:
    """A tokenizer.json with other special tokens than the source's `</s>`, which is an ordinary piece of it."""
    values = json.loads(source.read_text("utf-8"))
    values["added_tokens"] = [token for token in values["added_tokens"] if token["content"] != "</s>"]
    made = tokenizers.Tokenizer.from_str(json.dumps(values))
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": PLAIN, **config}))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("family", ENDS)
def test_documents_of_a_family_end_with_the_token_that_its_files_name(
    tmp_path: Path, sources: dict[str, Path], family: str
) -> None:
    """Another special token would be the guess, and `</s>` is in the vocabulary as an ordinary piece."""
    end = ENDS[family]
    as_object = {"__type": "AddedToken", "content": end, "lstrip": False, "normalized": False, "rstrip": False}
    path = write_json_tokenizer(tmp_path, sources["huggingface"], ["<|eot_id|>", end])
    for values in (end, as_object):
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": PLAIN}))
            (tmp_path / name).write_text(json.dumps({"tokenizer_class": PLAIN, "eos_token": values}))
            ours, theirs = (
                load_tokenizer(TokenizerConfig("huggingface", str(path))),
                AutoTokenizer.from_pretrained(tmp_path),
            )
            assert (ours.eos_token, ours.eos_id) == (theirs.eos_token, theirs.eos_token_id)
            assert ours.eos_token == end
            (tmp_path / name).unlink()


def test_an_ordinary_piece_never_ends_a_document_unless_a_file_names_it(
    tmp_path: Path, sources: dict[str, Path]
) -> None:
    path = write_json_tokenizer(tmp_path, sources["huggingface"], ["[EOS]"], eos_token="[EOS]")
    settings = TokenizerConfig("huggingface", str(path))
    piece = json.loads(path.read_text())["model"]["vocab"]["</s>"]
    assert load_tokenizer(settings).eos_token == "[EOS]"
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="no file beside it names an eos_token, and its special tokens have none of"):
        load_tokenizer(settings)
    write_json_tokenizer(tmp_path, sources["huggingface"], ["<|eot_id|>"])
    assert load_tokenizer(settings).eos_token == "<|eot_id|>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(settings).eos_id == piece


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_prepared_tokens_are_made_again_only_if_the_files_change_them(
    tmp_path: Path, sources: dict[str, Path], kind: str
) -> None:
    path = Path(shutil.copy(sources[kind], tmp_path))

    def fingerprint(**files: Any) -> str:
        for name, values in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(values))
        found = load_tokenizer(TokenizerConfig(kind, str(path))).fingerprint
        for name in files:
            (tmp_path / f"{name}.json").unlink()
        return found

    alone = hashlib.sha256(path.read_bytes() + b"</s>bos [0]" * (kind == "huggingface")).hexdigest()
    assert fingerprint() == fingerprint(special_tokens_map={"eos_token": "</s>", "bos_token": "<s>"}) == alone
    changed = [
        fingerprint(tokenizer_config={"eos_token": "<s>"}),
        fingerprint(tokenizer_config={"pad_token": "<pad>"}),
        fingerprint(added_tokens={"<pad>": 500}),
    ]
    assert len({alone, *changed}) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read: "),
        ("special_tokens_map.json", "[]", "special_tokens_map.json holds no JSON object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"5": "<x>"}}',
            "tokenizer_config.json is not as transform",
        ),
        ("added_tokens.json", '{"<x>": "five"}', "added_tokens.json is not as transformers writes it: ValueError"),
    ],
)
def test_a_damaged_file_beside_a_tokenizer_is_named(
    tmp_path: Path, sources: dict[str, Path], name: str, content: str, message: str
) -> None:
    path = shutil.copy(sources["huggingface"], tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(TokenizerConfig("huggingface", str(path)))
    assert caught.value.fix == "correct or remove it"


def test_a_file_gives_a_piece_another_name(tmp_path: Path, sources: dict[str, Path]) -> None:
    """As InternLM's: the model has placeholders, and tokenizer_config.json says which tokens they are."""
    path = write_llama_model(tmp_path / "tokenizer.model", control_symbols=["[UNUSED_1]"])
    token = {"content": "<|plugin|>", "special": True, "normalized": False}
    config = {"tokenizer_class": PLAIN, "added_tokens_decoder": {"3": token}, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(TokenizerConfig("sentencepiece", str(path))), AutoTokenizer.from_pretrained(tmp_path)
    text = "the <|plugin|>re"
    [(ids, _)] = ours.encode_chat_batch([text])
    assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert 3 in ids
    assert ours.decode(ids) == "the re"
    assert ours.vocab_size == 400


@pytest.mark.parametrize(
    ("files", "kind", "found"),
    [
        (("tokenizer.model", "tokenizer.json"), "sentencepiece", "tokenizer.model"),
        (("tokenizer.model", "tokenizer.json"), "huggingface", "tokenizer.json"),
        (("tokenizer.json",), "sentencepiece", "tokenizer.json"),
        (("tokenizer.model",), "huggingface", "a folder without tokenizer.json"),
        ((), "sentencepiece", "a folder without tokenizer.model and tokenizer.json"),
    ],
)
def test_a_folder_stands_for_the_file_in_it(tmp_path: Path, files: tuple[str, ...], kind: str, found: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    settings = TokenizerConfig(kind, str(tmp_path))
    if " " in found:
        with pytest.raises(DataError, match=rf"{found}\n  fix: give the folder or the path of"):
            name_tokenizer_file(settings)
        return
    kinds = {"tokenizer.model": "sentencepiece", "tokenizer.json": "huggingface"}
    assert name_tokenizer_file(settings) == TokenizerConfig(kinds[found], str(tmp_path / found))
    given = TokenizerConfig(kind, str(tmp_path / "other.model"))
    assert name_tokenizer_file(given) == given


def test_vocabularies_are_compared_by_what_ids_mean(tmp_path: Path, sources: dict[str, Path]) -> None:
    """The same model under other special tokens, or as a tokenizer.json, is the same; another one differs."""
    own = load_tokenizer(TokenizerConfig("sentencepiece", str(sources["sentencepiece"])))
    folder = tmp_path / "chat"
    folder.mkdir()
    shutil.copy(sources["sentencepiece"], folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "eos_token": "[END]"})
    )
    AutoTokenizer.from_pretrained(folder).backend_tokenizer.save(str(folder / "tokenizer.json"))
    chat = load_tokenizer(TokenizerConfig("sentencepiece", str(folder / "tokenizer.model")))
    converted = load_tokenizer(TokenizerConfig("huggingface", str(folder / "tokenizer.json")))
    assert own.eos_token != chat.eos_token == converted.eos_token
    assert other_pieces(own, chat) == other_pieces(chat, converted) == other_pieces(converted, own) == []
    # As Gemma's converter writes it.
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace('"<0x09>":', '"\\t":'))
    assert other_pieces(own, load_tokenizer(TokenizerConfig("huggingface", str(folder / "tokenizer.json")))) == []
    larger = write_llama_model(tmp_path / "larger.model", control_symbols=["<end>", "<two>"])
    other = load_tokenizer(TokenizerConfig("sentencepiece", str(larger)))
    assert len(other_pieces(own, other)) > 100
    assert len(other_pieces(own, ByteTokenizer())) > 390
