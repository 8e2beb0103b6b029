"""What follows from a chat template: where it is found, the frame of a prompt, the tokens that end an answer."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.chats import SPECIAL, TURNS, VARIABLES, plain, write_llama_model, write_tokenizer
from tests.support.runs import config_of_lines
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.run import Passkey
from torchtitan_cp.data.corpus.chat import ChatTemplate
from torchtitan_cp.data.corpus.huggingface_tokenizer import HuggingFaceTokenizer
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from torchtitan_cp.evaluation.prompts import VARIANTS, PromptWriter
from torchtitan_cp.training.chat import (
    chat_template_of,
    chat_templates_of,
    encode_turns,
    end_tokens,
    end_tokens_of,
    prompt_frame,
)

CHATML = plain("chatml")
END, START_TURN, END_TURN = (SPECIAL.index(token) for token in ("</s>", "<|im_start|>", "<|im_end|>"))
BYTES_TEMPLATE = ChatTemplate(TURNS.read_text(), {"eos_token": ByteTokenizer().eos_token})


def test_an_answer_ends_at_the_end_of_text_and_at_special_tokens_right_behind_it(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    assert end_tokens(ChatTemplate(CHATML), tokenizer) == {END, END_TURN}
    assert end_tokens(BYTES_TEMPLATE, ByteTokenizer()) == {256}
    unmarked = ChatTemplate("{% for message in messages %}{{ message.content + '\\n' }}{% endfor %}")
    assert end_tokens(unmarked, tokenizer) == {END}, "a line break ends no answer"
    two = ChatTemplate(CHATML.replace("<|im_end|>", "<|im_end|><|im_start|>"))
    assert end_tokens(two, tokenizer) == {END, START_TURN, END_TURN}


def test_an_answer_and_a_call_end_as_each_template_that_is_used_writes_them(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))

    def ends(default: str, **named: str) -> set[str]:
        found = end_tokens(ChatTemplate(default, VARIABLES, named), tokenizer)
        return {SPECIAL[token] for token in found}

    assert ends(plain("gpt_oss")) == {"</s>", "<|return|>", "<|call|>"}
    assert ends(plain("mistral")) == {"</s>"}, "two tokens in brackets begin a call"
    assert ends(CHATML, tool_use=plain("llama3"), rag=plain("gemma3")) == {"</s>", "<|im_end|>", "<|eot_id|>"}
    needs_tools = "{{ tools[0].function.name }}" + plain("llama3")
    assert ends(CHATML, tool_use=needs_tools) == {"</s>", "<|im_end|>", "<|eot_id|>"}
    assert ends("", tool_use=needs_tools) == {"</s>", "<|eot_id|>"}
    templates = [ChatTemplate(source) for source in (CHATML, "{{ raise_exception('no') }}", plain("llama3"))]
    found = end_tokens_of(templates, tokenizer)
    assert {SPECIAL[token] for token in found} == {"</s>", "<|im_end|>", "<|eot_id|>"}
    assert end_tokens_of([], tokenizer) == frozenset()
    as_text = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments + '<|call|>' }}"
    )
    assert ends(as_text + "{% endfor %}<|end|>\n{% endfor %}") == {"</s>", "<|end|>"}
    assert ends(as_text + "{% endfor %}\n{% endfor %}") == {"</s>", "<|call|>"}


@pytest.mark.parametrize("kind", ["bytes", "huggingface"])
def test_the_frame_and_a_text_are_the_tokens_of_the_conversation(tmp_path: Path, kind: str) -> None:
    own = HuggingFaceTokenizer(write_tokenizer(tmp_path)) if kind == "huggingface" else ByteTokenizer()
    template = ChatTemplate(CHATML) if kind == "huggingface" else BYTES_TEMPLATE
    frame, text = prompt_frame(template, own), "What is in the box? \u00e9"
    tokens = np.concatenate([frame.opening, own.encode_chat_batch([text + frame.closing])[0][0]])
    assert tokens.tolist() == encode_turns(template, own, [{"role": "user", "content": text}])
    assert frame.special.tolist() == ([END, START_TURN, END_TURN] if kind == "huggingface" else [256])


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_a_prompt_in_a_frame_has_the_tokens_of_the_conversation_and_its_answer(tmp_path: Path, kind: str) -> None:
    own: Tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path))
    if kind == "sentencepiece":
        own = SentencePieceTokenizer(write_llama_model(tmp_path / "m", control_symbols=["<|im_start|>", "<|im_end|>"]))
    template, settings = ChatTemplate(CHATML), Passkey(needle="{name}: {key}.", question=" What is {name}? {key}")

    def encode(text: str) -> np.ndarray:
        return own.encode_chat_batch([text])[0][0]

    def filler(number: int, count: int) -> np.ndarray:
        return np.zeros(count, np.int64)

    written = PromptWriter(encode, filler, settings)
    written.frame = prompt_frame(template, own)
    prompt, length = None, 0
    while not prompt:  # the shortest, without filler
        length += 1
        prompt = written.write("passkey", length, 0.0, 0)
    draw = np.random.default_rng([0, length])
    [needle], question, answer = VARIANTS["passkey"](written, draw, filler(0, length))
    turns = template.render([{"role": "user", "content": needle + question}], add_generation_prompt=True)
    assert prompt.tokens.tolist() == encode(turns + answer.lstrip()).tolist()
    assert own.decode(prompt.labels[prompt.labels != IGNORED]) == answer.lstrip()


def test_a_template_that_does_not_take_a_question_or_changes_its_text_is_named() -> None:
    refuses = ChatTemplate("{{ raise_exception('a system message comes first') }}")
    lower = ChatTemplate("{% for message in messages %}{{ message.content | lower }}{% endfor %}")
    for follows in (prompt_frame, end_tokens):
        with pytest.raises(ConfigError, match=r"\(of user.*\): template error: .*a system message comes first"):
            follows(refuses, ByteTokenizer())
        with pytest.raises(ConfigError, match="the chat template changes the text of messages"):
            follows(lower, ByteTokenizer())


def test_a_run_takes_the_template_of_its_conversations_and_else_of_its_tokenizer(tmp_path: Path) -> None:
    plain = config_of_lines(tmp_path, "[data]", 'source = "python-stdlib"', "[tokenizer]", 'kind = "bytes"')
    assert chat_template_of(plain) is None
    (tmp_path / "own.jinja").write_text("own")
    path = write_tokenizer(tmp_path / "hub")
    lines = ["[tokenizer]", 'kind = "huggingface"', f'path = "{path}"', "[data]"]
    assert chat_template_of(config_of_lines(tmp_path, *lines)) is None
    (tmp_path / "hub" / "chat_template.jinja").write_text(CHATML)
    found = chat_template_of(config_of_lines(tmp_path, *lines))
    assert found
    assert found.source == CHATML
    assert found.variables == VARIABLES
    sources = [
        *("[[data.sources]]", 'name = "text"'),
        *("[[data.sources]]", 'name = "chats"', 'source = "python-docstrings"'),
        f'chat_template = "{tmp_path / "own.jinja"}"',
    ]
    found = chat_template_of(config_of_lines(tmp_path, *lines, *sources))
    assert found
    assert found.source == "own"
    more = ["[[data.sources]]", 'name = "more"', 'source = "python-docstrings"']
    more += ["[[data.sources]]", 'name = "most"', 'source = "python-docstrings"']
    run = config_of_lines(tmp_path, *lines, *sources, *more)
    assert [template.source for template in chat_templates_of(run)] == ["own", CHATML]
