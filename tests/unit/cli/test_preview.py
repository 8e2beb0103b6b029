"""The command `preview` as a user meets it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.support.memory import MemoryStore
from tests.support.pages import REPOSITORY
from tests.support.runs import CHAT_TEMPLATE, TINY, write_conversations, write_run
from torchtitan_cp.cli.preview import Page, main
from torchtitan_cp.data.batches.packed_stream import PackedSequence, Span
from torchtitan_cp.data.corpus.tokenizer import ByteTokenizer


def preview(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_conversations_are_shown_with_what_is_learned_their_lengths_and_the_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = preview(capsys, str(write_conversations(tmp_path)), "--tokens", "0", "--samples", "1")
    stage = r"stage 1, 128: 20 steps of 4 sequences of 128 tokens; packed by best_fit, \d+% of .*; corpus: \d+ of \d+ "
    assert re.search(stage + r"conversations cut, \d+ cuts inside a learned turn, \d+\.\d% padding \(each", said)
    assert re.search(r"corpus: \d+ documents, [\d,]+ tokens; left out or cut: \d+ x conversation longer than", said)
    assert "What is learned of conversations is between [[ and ]]." in said
    [head] = re.findall(r"sequence 1, corpus: (.*)", said)
    documents, learned = (int(re.search(rf"(\d+) {word}", head)[1]) for word in ("document", "learned"))  # type: ignore[index]
    assert len(re.findall(r"^-- document \d+: ", said, re.MULTILINE)) == documents
    answers = re.findall(r"\[\[(.*?)\]\]", said.partition("and ]].")[2], re.DOTALL)
    assert sum(len(answer.replace("</s>", "$")) for answer in answers) == learned, "the characters are the tokens here"
    assert all(answer.startswith("answer ") and answer.endswith("</s>") for answer in answers)
    assert re.search(r"U: question \d+ \d ", said)


def test_the_sample_of_the_page_is_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (REPOSITORY / "docs/conversations.md").read_text()
    [sample] = re.findall(r"^```text\n(sequence 1, chats: .*?)^```", page, re.MULTILINE | re.DOTALL)
    said = preview(capsys, str(write_conversations(tmp_path)), "--tokens", "0", "--samples", "1")
    lines = [line.rstrip() for line in said.splitlines()]
    expected = sample.replace("chats", "corpus").splitlines()
    assert lines[lines.index(expected[0]) :] == expected


def test_plain_text_has_no_marks_and_says_where_a_document_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = preview(capsys, str(write_run(tmp_path)), "--tokens", "20", "--samples", "2")
    assert said.count("\nsequence ") == 2
    assert "What is learned" not in said
    assert re.search(r"-- document \d+: tokens [\d,]+ to [\d,]+ of [\d,]+, it (begins and )?goes on in another", said)
    assert "\n... 108 tokens ...\n" in said


def test_only_samples_of_a_source_come_from_a_later_stage_behind_what_the_earlier_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = two_sources(tmp_path)
    said = preview(capsys, str(path), "--stage", "2", "--source", "chats", "--samples", "2")
    assert "stage 2, late: " in said
    assert set(re.findall(r"\nsequence \d+, (\w+): ", said)) == {"chats"}
    everything = preview(capsys, str(path), "--stage", "2", "--samples", "99")
    assert "The stage has no more." in everything
    assert len(re.findall(r"\nsequence \d+, ", everything)) == 8
    first = preview(capsys, str(path), "--samples", "99", "--tokens", "0")
    read = set(re.findall(r"-- document (\d+): tokens ([\d,]+) to ", first))
    later = re.findall(r"sequence \d+, text: .*\n-- document (\d+): tokens ([\d,]+) to ", everything)
    assert later
    assert not read & set(later)


def two_sources(folder: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": "a"}]} for n in range(50)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    sources = f"""[data]
cache_folder = "{folder}/cache"
[[data.sources]]
name = "text"
source = "text"
path = "{folder}/corpus"
[[data.sources]]
name = "chats"
source = "jsonl"
messages_field = "messages"
path = "{folder}/chats.jsonl"
chat_template = "{folder}/chat.jinja"

[training]"""
    head, tail = TINY.split("[data]")
    text = head + sources.replace("{", "{{").replace("}", "}}") + tail.split("[training]")[1]
    text = text.replace("steps = 20", "steps = 2\ndata = {{mixture = {{text = 1.0}}}}")
    text += '\n[[curriculum.stages]]\nname = "late"\nseq_len = 128\nsteps = 2\nglobal_batch_tokens = 512\ncp = 64\n'
    text += "data = {{mixture = {{text = 1.0, chats = 1.0}}}}\n"
    return write_run(folder, text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "chat"], "--source 'chat' is not known\n  fix: give one of text, chats"),
        (["--source", "chats"], "stage 1 reads nothing of the source 'chats'\n  fix: give --stage 2"),
        (["--stage", "3"], "--stage 3 does not exist\n  fix: give one of 1 to 2"),
        (["--data.sources[0].path=/nowhere"], "finds no file at data.sources['text'].path = '/nowhere'"),
        (["--data.mixture={a = 1.0}"], "data.mixture names 'a', and the sources are chats, text"),
        (["--curriculum.stages[1].data={mixture = {a = 1.0}}"], "curriculum.stages[1].data.mixture names 'a'"),
        (["--curriculum.stages=[]"], "there is no stage to train"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    path = two_sources(tmp_path)
    assert main([str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


def shown(width: int, *, color: bool, learned: list[bool], text: str = "one two three") -> list[str]:
    """What is printed of one document, by lines."""
    ids = [*text.encode(), 256]
    store = MemoryStore([len(ids)], masks=[learned])
    labels = np.where([*learned[1:], False], [*ids[1:], 0], -100)
    span = Span("chats", 0, 0, len(ids))
    row = PackedSequence(np.array(ids), labels, np.arange(len(ids)), (len(ids),), (span,))
    console = Console(width=width, force_terminal=color, color_system="standard" if color else None, soft_wrap=True)
    with console.capture() as printed:
        Page(console, ByteTokenizer(), 0).print_sequence(0, row, store)  # type: ignore[arg-type]
    return printed.get().splitlines()


def test_what_is_learned_is_colored_where_there_is_color_and_marked_where_there_is_none() -> None:
    learned = [False] * 8 + [True] * 6
    colored = "\n".join(shown(80, color=True, learned=learned))
    assert "one two \x1b[1;32mthree</s>\x1b[0m" in colored
    assert "[[" not in colored
    assert shown(80, color=False, learned=learned)[-1] == "one two [[three</s>]]"


def test_a_narrow_terminal_gets_whole_lines_and_short_rules() -> None:
    *_, head, rule, text = shown(20, color=False, learned=[False] * 14)
    assert head == "sequence 1, chats: 14 tokens, 1 document, 0 learned"
    assert (rule, text) == ("-- document 0: 14 tokens ", "one two three</s>")
    assert shown(60, color=False, learned=[False] * 14)[2] == "-- document 0: 14 tokens " + "-" * 35


def test_characters_that_steer_a_terminal_are_escaped() -> None:
    text = "a\x1b[31mb\r\x07\u202e \u00e9\u3000"
    *_, line = shown(80, color=False, learned=[False] * (len(text.encode()) + 1), text=text)
    assert line == "a\\x1b[31mb\\r\\x07\\u202e \u00e9\u3000</s>"
