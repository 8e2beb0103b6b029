"""How fast `torchtitan-cp prepare` makes tokens, by kind of corpus and number of processes."""

import json
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.benchmark import Benchmark, Row
from torchtitan_cp.config.data import Data
from torchtitan_cp.config.sections import Tokenizer
from torchtitan_cp.data.corpus.cache import prepare
from torchtitan_cp.data.corpus.documents import Corpus
from torchtitan_cp.data.corpus.records import SkippedRecords

TEMPLATE = Path(__file__).parents[1] / "train_configs/templates/turns.jinja"


TURN_CHARACTERS, TURNS = 1500, 8  # of a conversation, the user's and the assistant's


def measure(workers: list[int], megabytes: int) -> Iterator[Row]:
    """MB of stored text a second, and a second of CPU time of all processes, the start of workers among them.

    workers: processes that tokenize; megabytes: of text, at most. The text is the standard library's, by file, as rows
    of one file, and cut into turns of conversations. SentencePiece has a model of 8,192 pieces that is trained on it.
    """
    with tempfile.TemporaryDirectory() as folder:
        corpora = _write_corpora(Path(folder), megabytes * 1_000_000)
        trained = prepare(replace(corpora["text"], cache_folder=folder), Tokenizer(vocab_size=8192))
        tokenizers = {
            "sentencepiece": Tokenizer(path=str(trained.tokenizer.path)),
            "bytes": Tokenizer(kind="bytes"),
        }
        for name, data in corpora.items():
            for kind, tokenizer in tokenizers.items():
                for count in workers:
                    yield {"corpus": name, "tokenizer": kind, "processes": count, **_measure(data, tokenizer, count)}


def _write_corpora(folder: Path, most_bytes: int) -> dict[str, Data]:
    """The same text as files, as rows and as conversations."""
    texts = list[str]()
    for document in Corpus(Data(source="python-stdlib")).documents(SkippedRecords(quiet=True)):
        texts.append(str(document.content))
        if document.read_bytes > most_bytes:
            break
    for number, text in enumerate(texts):
        (folder / f"{number:05d}.txt").write_text(text, "utf-8")
    turns = [text[start : start + TURN_CHARACTERS] for text in texts for start in range(0, len(text), TURN_CHARACTERS)]
    chats = [
        [{"role": role, "content": turn} for role, turn in zip(("user", "assistant") * TURNS, part, strict=False)]
        for part in (turns[start : start + TURNS] for start in range(0, len(turns), TURNS))
    ]
    rows: dict[str, list[dict[str, object]]] = {
        "rows": [{"text": text} for text in texts],
        "chats": [{"messages": messages} for messages in chats],
    }
    for name, entries in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries), "utf-8")
    return {
        "text": Data(source="text", path=f"{folder}/*.txt"),
        "rows of one file": Data(source="jsonl", path=f"{folder}/rows.jsonl"),
        "conversations": Data(
            source="jsonl", path=f"{folder}/chats.jsonl", messages_field="messages", chat_template=str(TEMPLATE)
        ),
    }


def _measure(data: Data, tokenizer: Tokenizer, workers: int) -> Row:
    """Prepare the corpus in a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        megabytes, cpu_seconds, begun = Corpus(data).size_bytes / 1e6, _cpu_seconds(), time.perf_counter()
        prepare(replace(data, cache_folder=cache), tokenizer, workers=workers)
        seconds, cpu_seconds = time.perf_counter() - begun, _cpu_seconds() - cpu_seconds
    return {"MB_a_second": megabytes / seconds, "MB_a_core_second": megabytes / cpu_seconds}


def _cpu_seconds() -> float:
    """CPU time of this process and of the children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


BENCHMARK = Benchmark(measure, {"workers": [1, 2], "megabytes": 24}, {"megabytes": 2})
