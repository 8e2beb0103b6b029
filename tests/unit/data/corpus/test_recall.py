"""Names planted in text: each keeps its key, comes back at all distances, and is the same in every process."""

import random
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from torchtitan_cp.config.sections import Data
from torchtitan_cp.data.corpus.documents import Corpus
from torchtitan_cp.data.corpus.recall import DOCUMENTS, plant_names, recall_documents
from torchtitan_cp.data.corpus.records import SkippedRecords

TEXT = "0123456789"  # has no letters, so that every name is a planted one


def test_every_name_keeps_its_key_and_comes_back_at_all_distances_up_to_half_of_the_document() -> None:
    gaps = []
    for seed in range(8):
        text = plant_names(TEXT, characters=4096, names=13, draw=random.Random(seed))
        assert 4096 <= len(text) <= 4097
        assert re.fullmatch(r"(\d|[A-Z][a-z])*", text)
        keys, places = defaultdict(set), defaultdict(list)
        for found in re.finditer(r"([A-Z])([a-z])", text):
            keys[found[1]].add(found[2])
            places[found[1]].append(found.start())
        assert len(keys) == 13
        assert all(len(told) == 1 for told in keys.values())
        gaps += [np.diff(each) for each in places.values()]
    distances = np.concatenate(gaps)
    assert distances.min() >= 2
    assert distances.max() <= 2048 + 2 * 13, "others that are due come first"
    # A document is only twice as long as the largest distance, so that few of the last octave fit.
    octaves = np.bincount(np.log2(distances).astype(int))[2:10]
    assert octaves.min() > 0.4 * octaves.max(), "log-uniform"


def test_names_come_near_the_beginning_and_a_power_below_1_prefers_far_repetitions() -> None:
    def gaps(power: float) -> np.ndarray:
        found = []
        for seed in range(8):
            text = plant_names(TEXT, 2048, 8, random.Random(seed), power)
            places = [
                [mention.start() for mention in re.finditer(name, text)] for name in set(re.findall("[A-Z]", text))
            ]
            assert max(each[0] for each in places) < 8 * (3 + 2), (
                "three characters a name, and those that were due before"
            )
            found += [np.diff(each) for each in places]
        return np.concatenate(found)

    assert np.median(gaps(0.5)) > 2 * np.median(gaps(1.0))


def test_what_lies_between_the_names_is_the_text_from_some_place_on_and_again_from_its_start() -> None:
    text = plant_names(TEXT, characters=512, names=3, draw=random.Random(1))
    rest = re.sub("[A-Z][a-z]", "", text)
    start = TEXT.index(rest[0])
    assert rest == (TEXT[start:] + TEXT * 60)[: len(rest)]


def test_a_text_gives_many_short_documents_and_a_long_one_that_its_seed_alone_decides() -> None:
    documents = list(recall_documents(TEXT, "a.py"))
    assert Counter(len(document) // 128 * 128 for document in documents) == {
        characters: count for characters, _, count, _ in DOCUMENTS
    }
    assert documents == list(recall_documents(TEXT, "a.py"))
    assert not set(documents) & set(recall_documents(TEXT, "b.py"))
    assert len(set(documents)) == len(documents)


def test_the_source_plants_names_in_the_standard_library_and_holds_out_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        (tmp_path / f"m{number:02}.py").write_text("0123456789abcdefghijkl"[number] * 50)
    (tmp_path / "empty.py").write_text("")
    monkeypatch.setattr("torchtitan_cp.data.corpus.sources.location", lambda source: str(tmp_path))
    corpus = Corpus(Data(source="python-recall", validation_fraction=0.3))
    documents = list(corpus.documents(SkippedRecords()))
    assert len(documents) == 12 * sum(count for _, _, count, _ in DOCUMENTS)
    held_out = defaultdict(set)
    for document in documents:
        held_out[document.key].add(document.held_out)
    assert all(len(split) == 1 for split in held_out.values())
    assert set().union(*held_out.values()) == {True, False}
    assert documents[0].content == next(recall_documents("0" * 50, "m00.py"))
