"""Generation with a cache gives what full forwards give, and text comes as it is made."""

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.architecture import LanguageModel
from models.huggingface import ARCHITECTURE
from models.huggingface.args import args_from_config
from models.huggingface.model import HuggingFaceModel
from models.llama import Llama, LlamaArgs
from models.qwen3_5 import Hybrid, HybridArgs
from tests.support.chats import TURNS
from tests.support.huggingface_families import FAMILIES, eager_model, random_weights
from torchtitan_cp.checkpoint.weights import SavedModel
from torchtitan_cp.cli import generate as program
from torchtitan_cp.cli.generate import (
    attend_cached,
    chat,
    generate,
    main,
    new_caches,
    print_stream,
    sample_token,
    stream_text,
    user_lines,
)
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.data.corpus.chat import ChatTemplate
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer
from torchtitan_cp.training.chat import encode_turns
from torchtitan_cp.training.registry import register, sizes_of

SHAPES = {
    "plain": LlamaArgs(48, 3, 4, 2, 16, 96, 97),
    "every option": LlamaArgs(48, 3, 4, 2, 16, 96, 97, windows=(5, 0), qkv_bias=True, qk_norm=True, sinks=True),
    "states": HybridArgs(
        *(48, 4, 4, 2, 16, 96, 97),
        linear_key_heads=3,
        linear_value_heads=6,
        linear_key_dim=8,
        linear_value_dim=12,
    ),
}
# Of transformers: a scan, a delta rule, and a scan beside attention.
FAMILIES_OF_STATES = ("Nemotron-H", "Kimi Linear", "Falcon-H1", "LFM2")
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]


def model_of_family(family: str) -> HuggingFaceModel:
    model = HuggingFaceModel(args_from_config(FAMILIES[family], {}), attend_cached).eval()
    random_weights(model, 0)
    return model


def model_of(shape: LlamaArgs) -> Llama:
    model = (Hybrid if isinstance(shape, HybridArgs) else Llama)(shape, attend_cached).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.set_rope([0.5**pair for pair in range(shape.rotary_dim // 2)], 1.0, torch.device("cpu"))
    return model


def full_logits(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        caches = new_caches(model)
        return model(torch.tensor([tokens]), torch.arange(len(tokens)), iter(caches))[0]


@pytest.mark.parametrize("name", [*SHAPES, *FAMILIES_OF_STATES])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT * 10], ids=len)
def test_the_cache_gives_the_logits_of_full_forwards(name: str, prompt: list[int]) -> None:
    model = model_of(SHAPES[name]) if name in SHAPES else model_of_family(name)
    tokens = [*prompt, *range(20)]
    want = full_logits(model, tokens)
    caches = new_caches(model)
    with torch.no_grad():
        rows = [model(torch.tensor([prompt]), torch.arange(len(prompt)), iter(caches))[0]]
        for place in range(len(prompt), len(tokens)):
            rows.append(model(torch.tensor([[tokens[place]]]), torch.tensor([place]), iter(caches))[0])
    assert (torch.cat(rows) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_are_those_of_full_forwards_and_end_at_the_end_of_text(name: str) -> None:
    model, tokens = model_of(SHAPES[name]), list(PROMPT)
    for _ in range(12):
        tokens.append(int(full_logits(model, tokens)[-1].argmax()))
    made = tokens[len(PROMPT) :]
    assert list(generate(model, PROMPT, 12)) == made
    end = made[5]
    assert list(generate(model, PROMPT, 12, end_ids=(end, -1))) == made[: made.index(end)]


def test_sampled_tokens_follow_the_seed_and_the_temperature() -> None:
    model = model_of(SHAPES["plain"])

    def sample(temperature: float, seed: int) -> list[int]:
        return list(generate(model, PROMPT, 12, temperature, torch.Generator().manual_seed(seed)))

    assert sample(5.0, 1) == sample(5.0, 1)
    assert sample(5.0, 1) != sample(5.0, 2)
    for nearly_greedy in (1e-6, 1e-40, 1e-300):
        assert sample(nearly_greedy, 1) == list(generate(model, PROMPT, 12))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_an_embedding_that_is_no_token_is_never_drawn(temperature: float) -> None:
    """Of a padded vocabulary, whose last logits are the largest."""
    model, hooked = model_of(SHAPES["plain"]), []

    def prefer_padding(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        hooked.append(logits.shape[-1])
        return logits + torch.arange(logits.shape[-1]).ge(20) * 100.0

    model.output.register_forward_hook(prefer_padding)
    drawn = list(generate(model, PROMPT, 30, temperature, torch.Generator().manual_seed(0), vocab_size=20))
    assert len(drawn) == 30
    assert max(drawn) < 20 < hooked[0]
    assert max(generate(model, PROMPT, 1, temperature, torch.Generator())) >= 20


def test_a_drawn_token_has_the_probability_of_the_softmax() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    drawn = torch.bincount(torch.tensor([sample_token(logits, 2.0, generator) for _ in range(4000)]), minlength=3)
    want = (logits / 2.0).softmax(-1)
    # Four standard deviations of a share of 4,000 draws are at most 4 / (2 sqrt(4000)).
    assert (drawn / 4000 - want).abs().max() < 0.032


def test_a_text_ends_with_the_table_of_positions_and_a_longer_prompt_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    register([ARCHITECTURE])
    tokenizer = ByteTokenizer()
    keys = FAMILIES["GPT-2"] | {"n_positions": 64, "max_position_embeddings": 64, "vocab_size": tokenizer.vocab_size}
    state = eager_model(keys).state_dict()
    saved = SimpleNamespace(
        config=Config().with_keys(model={"architecture": "huggingface"}, training={"compute_dtype": "float32"}),
        sizes=sizes_of(args_from_config(keys, {})),
        stage=Stage(seq_len=16),
        path=Path("step-1"),
        tensors=state,
        read=lambda names: {name: state[name] for name in names},
    )
    saved.length_note = SavedModel.length_note.fget(saved)  # type: ignore[attr-defined]
    monkeypatch.setattr(program, "open_saved_model", lambda _: saved)
    monkeypatch.setattr(program, "tokenizer_of", lambda _: tokenizer)
    made: list[int] = []
    monkeypatch.setattr(program, "generate", lambda *given: made.extend(generate(*given[:5])) or iter(made))
    arguments = ["run", "--temperature", "0", "--prompt"]
    assert main([*arguments, "a" * 60]) == 0
    assert len(made) == 5, "the last token takes no position"
    assert "the 16 tokens that step-1 was trained on, and cut at its 64 learned positions" in capsys.readouterr().err
    assert main([*arguments, "a" * 65]) == 2
    assert "the prompt = 65 is longer than this model's table of 64 learned positions" in capsys.readouterr().err


def test_text_comes_in_whole_characters_and_all_of_it() -> None:
    prompt = list(b"a")
    parts = list(stream_text("bé→".encode(), ByteTokenizer(), prompt))
    assert parts == ["b", "é", "→"]
    assert list(stream_text("é".encode()[:1], ByteTokenizer(), prompt)) == ["\ufffd"]


def test_the_text_of_a_token_takes_no_longer_after_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, decode = [], ByteTokenizer.decode

    def counted(self: ByteTokenizer, ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(ByteTokenizer, "decode", counted)
    text = "→é and plain words " * 20
    assert "".join(stream_text(text.encode(), ByteTokenizer(), list(b"before " * 1000))) == text
    assert max(decoded) < 30


def test_lines_come_from_a_pipe_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo"))
    assert list(user_lines()) == ["one", "", "two"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\n"), encoding="utf-8", errors=errors))
    with pytest.raises(ConfigError, match="standard input is not UTF-8"):
        list(user_lines())


def test_a_prompt_that_is_not_utf8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--prompt", os.fsdecode(b"a\xff")])
    assert ended.value.code == 2
    assert "argument --prompt: invalid utf8_text value: 'a\\udcff'" in capsys.readouterr().err


def test_a_conversation_keeps_its_turns_and_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, prompts = ByteTokenizer(), list[str]()
    template = ChatTemplate(TURNS.read_text(), {"eos_token": tokenizer.eos_token})

    def answer(prompt: list[int]) -> Iterator[str]:
        prompts.append(bytes(0 if token == 256 else token for token in prompt).decode())
        yield from ("it is ", str(len(prompts)))

    (tmp_path / "box.txt").write_text("In the box.\n")
    lines = ["What?\n", "", "/file none.txt", f"/file {tmp_path / 'box.txt'}", "And where?", "/quit", "Never asked"]
    chat(lines, lambda turns: print_stream(answer(encode_turns(template, tokenizer, turns))), system="Be brief.")
    printed = capsys.readouterr()
    assert printed.out == "it is 1\nit is 2\n"
    assert "none.txt" in printed.err
    first = "system\nBe brief.\0user\nWhat?\0assistant\n"
    assert prompts == [first, first + "it is 1\0user\nIn the box.\n\n\nAnd where?\0assistant\n"]


def test_a_template_that_refuses_a_role_ends_the_conversation_with_its_reason() -> None:
    template = ChatTemplate(
        "{% if messages and messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    with pytest.raises(ConfigError, match=r"does not take these messages.*no system"):
        chat(["Hi"], lambda turns: str(encode_turns(template, ByteTokenizer(), turns)), system="Be brief.")
