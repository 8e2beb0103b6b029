"""Chat templates of known families, written in our words, with a small tokenizer that has their special tokens."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

FOLDER = Path(__file__).parent / "chat_templates"
FAMILIES = ("chatml", "llama3", "mistral", "qwen3", "gpt_oss", "gemma3")
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
    *("<start_of_turn>", "<end_of_turn>", "<think>", "</think>"),
)
# Without special tokens but the end of text, which every tokenizer has.
TURNS = Path(__file__).parents[2] / "train_configs" / "templates" / "turns.jinja"
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sum.", "parameters": {"type": "object"}}}]


def marked(family: str) -> str:
    """A template that marks what the assistant generates."""
    return (FOLDER / f"{family}.jinja").read_text("utf-8")


def plain(family: str) -> str:
    """The same template without the marks."""
    return re.sub(r"\{% (end)?generation %\}", "{{- '' -}}", marked(family))


def turns(*contents: Any, first: str = "user") -> list[dict[str, Any]]:
    """A conversation whose messages are the user's and the assistant's by turns."""
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles[first != "user" :], contents)]  # noqa: B905


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def call(**arguments: Any) -> dict[str, Any]:
    """The assistant calls the tool."""
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """A byte-level BPE of few merges with every special token; tokenizer_config.json names some. Returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [Path(__file__).read_text("utf-8"), *map(marked, FAMILIES)],
        tokenizers.trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=list(SPECIAL),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**VARIABLES, **config}))
    return folder / "tokenizer.json"


def write_llama_model(path: Path, **options: Any) -> Path:
    """A SentencePiece model with options as Llama 2's, that puts a space before a text. Returns its file."""
    settings = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "minloglevel": 2,
    }
    lines = iter(Path(__file__).read_text("utf-8").splitlines())
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=file, **(settings | options))
    return path


FORMS = ("one", "one file", "list", "dict", "files", "files over a list", "no default", "tool_use file over one")


def write_templates(folder: Path, form: str, default: str, tool_use: str) -> dict[str, Any]:
    """Write the template files of a form, where it has some. Returns what tokenizer_config.json says of templates."""
    named = {"default": default, "tool_use": tool_use, "rag": "{{ documents[0] }}"}
    stored = [{"name": name, "template": text} for name, text in named.items()]
    if form in ("one file", "files", "files over a list"):
        (folder / "chat_template.jinja").write_text(default)
    if form in ("files", "files over a list", "no default", "tool_use file over one"):
        (folder / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
    config: dict[str, Any] = {"one": default, "tool_use file over one": default, "list": stored, "dict": named}
    config["files over a list"] = [{"name": name, "template": "stale"} for name in named]
    return {"chat_template": config[form]} if form in config else {}


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """JSON lines; a string is a line as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
