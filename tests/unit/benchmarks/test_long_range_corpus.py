"""The corpus of keys told early: every later key of a name is its first one, at all distances up to the longest."""

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.long_range_corpus import DOCUMENT_CHARACTERS, document, main


def test_every_name_keeps_its_key_and_comes_back_at_all_distances_up_to_the_longest() -> None:
    text = document(names=13, longest=256, seed=5)
    assert DOCUMENT_CHARACTERS <= len(text) <= DOCUMENT_CHARACTERS + 1
    assert re.fullmatch(r"(\.|[A-Z][a-z])*", text)
    keys, places = defaultdict(set), defaultdict(list)
    for found in re.finditer(r"([A-Z])([a-z])", text):
        keys[found[1]].add(found[2])
        places[found[1]].append(found.start())
    assert len(keys) == 13
    assert all(len(told) == 1 for told in keys.values())
    gaps = np.concatenate([np.diff(each) for each in places.values()])
    assert gaps.min() >= 2
    assert gaps.max() <= 256 + 2 * 13, "others that are due come first"
    octaves = np.bincount(np.log2(gaps).astype(int))[2:8]
    assert octaves.min() > 0.5 * octaves.max(), "log-uniform"


def test_the_program_writes_documents_that_its_seed_alone_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main([str(tmp_path / name), "--documents", "2", "--seed", seed]) == 0
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b != c
    texts = [json.loads(line)["text"] for line in a.splitlines()]
    assert len(set(texts)) == 2
    assert "2 documents" in capsys.readouterr().out
