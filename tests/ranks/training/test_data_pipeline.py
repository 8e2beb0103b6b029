"""One rank of a node prepares the corpus, the others open it; a stop or an error of one reaches all."""

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.corpus_cache import BYTES, data_of
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.texts import text_corpus
from torchtitan_cp.config import Config
from torchtitan_cp.config.data import Data
from torchtitan_cp.data.corpus import cache
from torchtitan_cp.data.errors import PreparationStoppedError
from torchtitan_cp.runtime import nodes
from torchtitan_cp.training.data_pipeline import prepare_corpus


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return data_of(text_corpus(tmp_path / "corpus"), tmp_path / "cache")


def config_of(data: Data) -> Config:
    return replace(Config(), data=data, tokenizer=BYTES)


def prepare_and_count_listings(data: Data) -> tuple[str, int]:
    listings, found = 0, cache.Corpus

    def list_files(*arguments: Any) -> cache.Corpus:
        nonlocal listings
        listings += 1
        return found(*arguments)

    cache.Corpus = list_files  # type: ignore[assignment, misc]
    try:
        return prepare_corpus(config_of(data), lambda: False).fingerprint, listings
    finally:
        cache.Corpus = found  # type: ignore[misc]


def test_one_rank_lists_the_files_at_each_start_and_notices_a_change(
    ranks: Callable[[int], RankPool], data: Data
) -> None:
    first = ranks(2)(prepare_and_count_listings, data)
    assert [listings for _, listings in first] == [1, 0]
    assert first[0][0] == first[1][0]
    assert ranks(2)(prepare_and_count_listings, data) == first
    (Path(data.path) / "part0" / "000.txt").write_text("another text")
    changed = ranks(2)(prepare_and_count_listings, data)
    assert changed[0][0] == changed[1][0] != first[0][0]


def prepare_as_a_node_of_its_own(data: Data, shared: bool) -> tuple[str, int]:
    """On a rank: as prepare_and_count_listings, where each rank is the first of a node, and locks hold on one alone."""
    place = {name: os.environ.get(name) for name in ("LOCAL_RANK", "GROUP_RANK")}
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=os.environ["RANK"])
    if not shared:
        data = replace(data, cache_folder=f"{data.cache_folder}-{os.environ['RANK']}")
    try:
        with patch.object(fcntl, "flock", lambda *_: None), patch.object(nodes, "SHARED_SECONDS", 0.5):
            return prepare_and_count_listings(data)
    finally:
        os.environ.pop("GROUP_RANK")
        os.environ.update({name: value for name, value in place.items() if value})


def test_nodes_that_share_a_cache_leave_it_to_the_first_and_others_make_their_own(
    ranks: Callable[[int], RankPool], data: Data
) -> None:
    shared = ranks(2)(prepare_as_a_node_of_its_own, data, True)
    apart = ranks(2)(prepare_as_a_node_of_its_own, data, False)
    assert [listings for _, listings in shared] == [1, 0]
    assert [listings for _, listings in apart] == [1, 1]
    assert len({fingerprint for fingerprint, _ in (*shared, *apart)}) == 1
    assert not list(Path(data.cache_folder).glob(".shared-*"))


def stop_on_rank_1(data: Data) -> str:
    asked = os.environ["RANK"] == "1"
    run = cache.Tokenization.tokenize

    def run_slowly(tokenization: cache.Tokenization) -> dict[str, object]:
        stop_requested = tokenization.stop_requested
        tokenization.stop_requested = lambda: time.sleep(0.1) or stop_requested()  # type: ignore[func-returns-value]
        return run(tokenization)

    cache.Tokenization.tokenize = run_slowly  # type: ignore[method-assign]
    try:
        prepare_corpus(config_of(data), lambda: asked)
    except PreparationStoppedError as stopped:
        return str(stopped)
    finally:
        cache.Tokenization.tokenize = run  # type: ignore[method-assign]
    return "not stopped"


def test_a_stop_of_a_rank_that_waits_stops_all(ranks: Callable[[int], RankPool], data: Data) -> None:
    messages = ranks(2)(stop_on_rank_1, data)
    assert messages[0] == messages[1]
    assert messages[0].startswith("stopped while tokenizing: ")
    assert not list(Path(data.cache_folder).glob("*/manifest.json"))
    assert ranks(2)(prepare_and_count_listings, data)[0][1] == 1


def test_an_error_of_the_rank_that_prepares_is_every_ranks_error(ranks: Callable[[int], RankPool], data: Data) -> None:
    with pytest.raises(RankFailure) as caught:
        ranks(2)(prepare_and_count_listings, replace(data, path=data.path + "/nowhere"))
    message = f"finds no file at data.path = '{data.path}/nowhere'\n  fix: set data.path to a folder of text files"
    assert str(caught.value).count(message) >= 1
