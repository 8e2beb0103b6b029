"""Prompts hold what they ask for, where they say, in exactly so many tokens."""

import re
from pathlib import Path
from string import ascii_letters

import numpy as np
import pytest
import tokenizers

from tests.support.chats import write_llama_model
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.names import VARIANTS as CONFIG_VARIANTS
from torchtitan_cp.config.run import Passkey
from torchtitan_cp.data.corpus.huggingface_tokenizer import HuggingFaceTokenizer
from torchtitan_cp.data.corpus.tokenizer import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from torchtitan_cp.data.corpus.tokenizer_training import train_sentencepiece
from torchtitan_cp.evaluation.prompts import VARIANTS, Frame, Prompt, PromptWriter

PASSKEY = Passkey(
    needle=" The magic number for {name} is: {key}. ", question=" What is the magic number for {name}? It is {key}"
)
LINES = ["The magic number for ABCDE is: 7654321. What is it? the grass is green, 0123456789."] * 99
TERSE = Passkey(needle="{name:.1}{key:.2}", question="{name:.1}{key:.2}")


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def grass(number: int, count: int) -> np.ndarray:
    """Filler text that differs by prompt."""
    return np.frombuffer((f"the grass is green, {number}. " * count).encode(), dtype=np.uint8)[:count].astype(np.int64)


def writer() -> PromptWriter:
    return PromptWriter(encode, grass, PASSKEY)


def text_of(prompt: Prompt) -> str:
    return bytes(prompt.tokens.tolist()).decode()


def answer_of(prompt: Prompt) -> str:
    """What is asked for, by the labels, which must be the tokens that follow."""
    asked = np.flatnonzero(prompt.labels != IGNORED)
    assert (np.diff(asked) == 1).all()
    assert (prompt.labels[asked] == prompt.tokens[asked + 1]).all()
    assert asked[-1] == len(prompt.tokens) - 2, "the answer ends the prompt"
    return bytes(prompt.labels[asked].tolist()).decode()


def test_the_config_knows_the_variants_that_there_are() -> None:
    assert set(VARIANTS) == set(CONFIG_VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [700, 1025])
def test_a_prompt_has_exactly_so_many_tokens_and_depends_on_its_number_alone(variant: str, length: int) -> None:
    first, again, other = (writer().write(variant, length, 0.5, number) for number in (3, 3, 4))
    assert first
    assert again
    assert other
    assert len(first.tokens) == len(first.labels) == length
    assert (first.tokens == again.tokens).all()
    assert answer_of(first) != answer_of(other)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_key_stands_at_its_depth_once_and_is_the_answer(depth: int) -> None:
    prompt = writer().write("passkey", 800, depth, 0)
    assert prompt
    text = text_of(prompt)
    needle = re.search(r" The magic number for ([A-Z]{5}) is: (\d{7})\. ", text)
    assert needle
    assert text.endswith(f" What is the magic number for {needle[1]}? It is {needle[2]}")
    assert answer_of(prompt) == f" {needle[2]}", "the space before it is part of the answer"
    room = 800 - len(needle[0]) - len(f" What is the magic number for {needle[1]}? It is {needle[2]}")
    assert needle.start() == round(depth * room)
    before, after = text[: needle.start()], text[needle.end() :]
    assert (before + after).startswith(bytes(grass(0, room).tolist()).decode()), "around it goes the filler"


def test_several_keys_are_told_and_the_one_at_the_depth_is_asked_for() -> None:
    for number in range(5):
        prompt = writer().write("multi_key", 900, 0.0, number)
        assert prompt
        told = dict(re.findall(r" for ([A-Z]{5}) is: (\d{7})\. ", text_of(prompt)))
        assert len(told) == 4
        asked = re.search(r"for ([A-Z]{5})\?", text_of(prompt))
        assert asked
        assert answer_of(prompt).strip() == told[asked[1]]
        assert text_of(prompt).startswith(f" The magic number for {asked[1]}")


def test_a_chain_of_variables_stands_in_order_and_all_of_it_is_the_answer() -> None:
    for number in range(5):
        prompt = writer().write("variable_tracking", 900, 0.2, number)
        assert prompt
        text = text_of(prompt)
        first = re.search(r" VAR ([A-Z]{5}) = (\d{7})\. ", text)
        assert first
        chain, place = [first[1]], first.start()
        for name, other in re.findall(r" VAR ([A-Z]{5}) = VAR ([A-Z]{5})\. ", text):
            assert other == chain[-1]
            assert text.index(f" VAR {name}") > place
            chain, place = [*chain, name], text.index(f" VAR {name}")
        assert len(chain) == 5
        assert f"assigned the value {first[2]} in" in text
        assert answer_of(prompt).split() == chain


def test_a_length_that_the_wording_does_not_fit_gives_no_prompt_and_the_shortest_has_no_filler() -> None:
    secret = {"name": "ABCDE", "key": "1234567", "word": "abcdefg"}
    least = len((PASSKEY.needle + PASSKEY.question).format(**secret))
    assert writer().write("passkey", least - 1, 0.5, 0) is None
    whole = writer().write("passkey", least, 0.5, 0)
    assert whole
    assert "grass" not in text_of(whole)


def test_a_name_that_the_filler_holds_is_not_taken() -> None:
    def letters(number: int, count: int) -> np.ndarray:
        return np.frombuffer(b"ABCDEFGHIJKLMNOPRSTUVWXYZ" * count, dtype=np.uint8)[:count].astype(np.int64)

    for number in range(10):
        prompt = PromptWriter(encode, letters, TERSE).write("passkey", 200, 0.5, number)
        assert prompt
        assert text_of(prompt).count("Q") == 2, "the only letter that is free, told and asked for"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_within_a_frame_is_a_conversation_whose_answer_follows_the_assistants_header(variant: str) -> None:
    plain, framed = writer(), writer()
    special = np.array([ord("g"), ord("\x02")])
    framed.frame = Frame(encode("\x01user:"), "\x02assistant:", special)
    before, prompt = plain.write(variant, 900, 0.3, 1), framed.write(variant, 900, 0.3, 1)
    assert before
    assert prompt
    assert len(prompt.tokens) == 900
    text = text_of(prompt)
    assert text.startswith("\x01user:")
    assert text.count("\x02") == 1, "only the frame has it"
    user, answer = text.split("\x02assistant:")
    assert answer == answer_of(prompt) == answer_of(before).lstrip()
    assert "the rass is reen" in user, "the filler has no special tokens"

    assert framed.write(variant, len("\x01user:\x02assistant:"), 0.0, 1) is None


def tokenizer_of(kind: str, path: Path) -> Tokenizer:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "our own":
        train_sentencepiece(LINES, 320, path)
        return SentencePieceTokenizer(path)
    if kind == "BPE as Llama 2's":
        return SentencePieceTokenizer(write_llama_model(path))
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], initial_alphabet=["\n", *ascii_letters]
    )
    made.train_from_iterator(LINES, trainer)
    if kind == "Prepend":
        steps = [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
        made.normalizer, made.pre_tokenizer = tokenizers.normalizers.Sequence(steps), None
    made.save(str(path))
    return HuggingFaceTokenizer(path)


@pytest.mark.parametrize("kind", ["bytes", "our own", "BPE as Llama 2's", "Metaspace", "Prepend"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_of_a_prompt_are_those_of_its_text_where_a_tokenizer_begins_texts_with_a_space(
    kind: str, variant: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(kind, tmp_path / "its")

    def tokens_of(text: str) -> list[int]:
        return tokenizer.encode_batch([text])[0].tolist()

    text = "the grass is green."
    filler = np.resize(tokens_of(text), 1024).astype(np.int64)
    settings = Passkey(needle=" The magic number for {name} is: {key}.", question="What is the number for {name}?{key}")
    written = PromptWriter(
        lambda text: tokenizer.encode_batch([text])[0], lambda number, count: filler[:count], settings
    )
    for number in range(5):
        needles, question, answer = VARIANTS[variant](written, np.random.default_rng([number, 1024]), filler)
        prompt = written.write(variant, 1024, 1.0, number)
        assert prompt
        assert len(prompt.tokens) == 1024
        before, whole = tokens_of(text + question), tokens_of(text + question + answer)
        assert whole[: len(before)] == before
        assert prompt.labels[prompt.labels != IGNORED].tolist() == whole[len(before) :]
        asked = whole[len(tokens_of(text)) :]
        assert prompt.tokens[-len(asked) :].tolist() == asked
        told = tokens_of(text + needles[0])[len(tokens_of(text)) :]
        if variant != "variable_tracking":  # else the other needles stand between
            assert prompt.tokens[-len(told) - len(asked) : -len(asked)].tolist() == told
