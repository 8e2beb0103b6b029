"""A run with a chat template: it answers lines, and transformers writes conversations as it does."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.chats import SPECIAL, marked, plain, system, turns, write_rows, write_tokenizer
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, prepared, train, write_run
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.cli import generate as program
from torchtitan_cp.cli.command import run_command
from torchtitan_cp.data.corpus.huggingface_tokenizer import HuggingFaceTokenizer
from torchtitan_cp.training.chat import chat_template_of
from torchtitan_cp.training.export import export

CHATML = marked("chatml")
END, START_TURN, END_TURN = (SPECIAL.index(token) for token in ("</s>", "<|im_start|>", "<|im_end|>"))
MESSAGES = [system("Be brief."), *turns("What is é?<|im_end|>", "", " Why? ")]
# Reads a special token, and has the line breaks and spaces that are easily lost.
TEMPLATE = "\n{{ eos_token }}" + CHATML + "{{ '  ' }}\n\n"


def write_chat_run(folder: Path, settings: str = "") -> Path:
    """A config with a tokenizer.json, without a template."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    own = f'kind = "huggingface"\npath = "{tokenizer}"'
    return write_run(folder, TINY.replace('kind = "bytes"', own) + settings)


def test_a_run_without_a_template_does_not_chat(
    ranks: Callable[[int], RankPool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(1)(train, write_chat_run(tmp_path), "--curriculum.stages[0].steps=1")
    assert program.main([str(tmp_path / "run"), "--chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["data.chat_template", "tokenizer_config.json", "chat_template.jinja"])
def test_a_run_answers_lines_and_its_export_has_the_template(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    path, overrides = write_chat_run(tmp_path), ["--curriculum.stages[0].steps=1", "--evaluation.passkey.trials=1"]
    if place == "tokenizer_config.json":
        end = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "special": True}
        values = {"chat_template": TEMPLATE, "eos_token": end, "model_max_length": 777}
        (tmp_path / "tokenizer" / place).write_text(json.dumps(values))
    elif place == "chat_template.jinja":  # and no tokenizer_config.json
        (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
        (tmp_path / "tokenizer" / place).write_text(TEMPLATE)
        (tmp_path / "tokenizer" / "additional_chat_templates").mkdir()
        (tmp_path / "tokenizer" / "additional_chat_templates" / "tool_use.jinja").write_text(plain("llama3"))
    else:
        (tmp_path / "own.jinja").write_text(TEMPLATE)
        rows = write_rows(tmp_path / "chats.jsonl", [{"messages": turns("What?", "This.")}] * 40)
        keys = {"source": "jsonl", "path": rows, "messages_field": "messages", "chat_template": tmp_path / "own.jinja"}
        overrides += [f"--data.{key}={value}" for key, value in keys.items()]
    ranks(1)(train, path, *overrides)

    monkeypatch.setattr("sys.stdin", io.StringIO("What is a box?\n\nAnd where?\n"))
    arguments = [str(tmp_path / "run"), "--chat", "--max-tokens", "5", "--temperature", "0", "--system", "Be brief."]
    assert program.main(arguments) == 0
    said = capsys.readouterr().out
    assert 2 <= said.count("\n") <= 12

    assert run_command(lambda: bool(export(tmp_path / "run", tmp_path / "out"))) == 0
    template = chat_template_of(open_saved_model(tmp_path / "run").config)
    assert template
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for prompts in (False, True):
        ours = template.render(MESSAGES, add_generation_prompt=prompts)
        options = {"add_generation_prompt": prompts, "return_dict": False}
        assert theirs.apply_chat_template(MESSAGES, tokenize=False, **options) == ours
        [(ids, _)] = HuggingFaceTokenizer(tmp_path / "tokenizer" / "tokenizer.json").encode_chat_batch([ours])
        assert theirs.apply_chat_template(MESSAGES, **options) == ids.tolist()
        assert END in ids[:3]
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    if place == "chat_template.jinja":
        assert generation["eos_token_id"] == [END, END_TURN, SPECIAL.index("<|eot_id|>")]
        assert theirs.chat_template == {"default": TEMPLATE, "tool_use": plain("llama3")}
    else:
        assert generation["eos_token_id"] == [END, END_TURN]
    if place == "tokenizer_config.json":
        assert theirs.model_max_length == 777


CHATS = """
[[data.sources]]
name = "text"
source = "text"
path = "{folder}/corpus"
validation_fraction = 0.25

[[data.sources]]
name = "chats"
source = "jsonl"
path = "{folder}/chats.jsonl"
messages_field = "messages"
validation_fraction = 0.5

[[curriculum.stages]]
seq_len = 512
steps = 1
global_batch_tokens = 1024
data = {{mixture = {{chats = 1.0}}}}
"""


def write_mixed_run(folder: Path) -> Path:
    """Plain text, then conversations."""
    write_rows(folder / "chats.jsonl", [{"messages": turns("What?", "This.")}] * 40)
    path = write_chat_run(folder)
    (folder / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    one_source = f'source = "text"\npath = "{folder}/corpus"\n'
    text = path.read_text().replace(one_source, "").replace("validation_fraction = 0.25\n", "")
    path.write_text(
        text.replace("seq_len = 128", "data = {mixture = {text = 1.0}}\nseq_len = 512") + CHATS.format(folder=folder)
    )
    return path


def prompts_of_stages(path: Path) -> list[list[int]]:
    """On a rank: the first prompt of each stage's evaluation."""
    trainer, found = prepared(path, "--curriculum.stages[0].steps=1"), []
    for stage in trainer.stages:
        trainer.evaluator.measure_retrieval(stage, trainer.enter_stage(stage))
        prompt = trainer.evaluator.prompts.write("passkey", 512, 0.0, 0)
        assert prompt
        found.append(prompt.tokens.tolist())
    return found


def test_keys_are_asked_for_in_the_template_where_a_stage_reads_conversations(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    text, chat = ranks(1)(prompts_of_stages, write_mixed_run(tmp_path))[0]
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    assert chat[0] == START_TURN
    assert [token for token in chat if token < len(SPECIAL)] == [START_TURN, END_TURN, START_TURN]
    user, answer = tokenizer.decode(chat).split("\nassistant\n")
    assert user.startswith("user\n One of the special magic numbers")
    assert user.endswith("mentioned in the text is")
    assert answer in user.split(". ")[0]
    assert tokenizer.decode(text).startswith(" One of the special magic numbers")
