"""Sources of a stage's samples: by weight, evenly spread, at any number, until a source has given its last."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_cp.data.batches.mixture import CHUNK_SAMPLES, Mixture, samples_within

WEIGHTS = {"web": 5.0, "code": 3.0, "books": 1.5, "maths": 0.5}
FIRST = "bwcwcmwwbcwwcwbcwwcw"


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[dict[str, float], int, int]:
    """Weights, seed, stage."""
    weights = draw(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8))
    named = {f"source {index}": weight for index, weight in enumerate(weights)}
    return named, draw(st.integers(0, 2**63)), draw(st.integers(0, 9))


def names_of(mixture: Mixture, samples: int) -> list[str]:
    return [mixture.sample(number)[0] for number in range(samples)]


@settings(deadline=None, max_examples=25)
@given(drawn=mixtures())
def test_shares_are_the_weights_after_any_number_of_samples(drawn: Any) -> None:
    weights = drawn[0]
    mixture = Mixture(*drawn, {})
    for samples in (1, 100, 10_000, 10_000_000):
        counts = mixture.counts(samples)
        assert sum(counts.values()) == samples
        for name, weight in weights.items():
            share = weight / sum(weights.values())
            assert abs(counts[name] - share * samples) <= 1 + share * len(weights)


def test_ten_thousand_samples_are_within_a_hundredth_of_the_weights() -> None:
    names = names_of(Mixture(WEIGHTS, 0, 0, {}), 10_000)
    for name, weight in WEIGHTS.items():
        assert names.count(name) / 10_000 == pytest.approx(weight / 10, rel=0.01)


@settings(deadline=None, max_examples=25)
@given(drawn=mixtures(), start=st.sampled_from([0, CHUNK_SAMPLES - 50, 10**9]))
def test_no_source_runs_longer_than_its_share_asks(drawn: Any, start: int) -> None:
    """Between two samples of the next largest source, at time 1 / w', a source gives w / w' samples and one at most."""
    weights = drawn[0]
    mixture = Mixture(*drawn, {})
    names = [mixture.sample(start + number)[0] for number in range(100)]
    for name, weight in weights.items():
        others = [other for at, other in weights.items() if at != name]
        runs = "".join("x" if at == name else " " for at in names).split()
        if others:
            assert max(map(len, runs), default=0) <= weight / max(others) + 1


@settings(deadline=None, max_examples=25)
@given(drawn=mixtures(), limits=st.lists(st.none() | st.integers(0, 6000), max_size=8))
def test_a_sample_tells_how_many_of_its_source_came_before_wherever_one_enters(drawn: Any, limits: Any) -> None:
    weights, seed, stage = drawn
    limited = {name: limit for name, limit in zip(weights, limits, strict=False) if limit is not None}
    mixture = Mixture(weights, seed, stage, limited)
    count = min(mixture.samples, 2 * CHUNK_SAMPLES + 10)
    backwards = [Mixture(weights, seed, stage, limited).sample(number) for number in range(count - 1, -1, -1009)]
    before = dict.fromkeys(weights, 0)
    samples = []
    for number in range(count):
        if number % 1000 == 0:
            assert mixture.counts(number) == before
        samples.append(mixture.sample(number))
        assert samples[-1][1] == before[samples[-1][0]]
        before[samples[-1][0]] += 1
    assert backwards == samples[::-1009]
    assert all(before[name] <= limit for name, limit in limited.items())
    assert mixture.counts(count) == before


def test_an_exhausted_source_leaves_its_share_to_the_others_by_their_weights() -> None:
    mixture = Mixture(WEIGHTS, 0, 0, {"web": 1000, "code": 900})
    ends = mixture.ends
    assert ends == {"web": pytest.approx(2000, abs=6), "code": pytest.approx(2000 + 300 / 0.6, abs=20)}
    for name, limit in (("web", 1000), ("code", 900)):
        assert mixture.sample(ends[name] - 1) == (name, limit - 1), "the last it gives"
        assert mixture.counts(ends[name])[name] == mixture.counts(10**6)[name] == limit
    first, later = mixture.counts(ends["code"]), mixture.counts(ends["code"] + 8000)
    assert later["books"] - first["books"] == pytest.approx(6000, abs=3)
    assert later["maths"] - first["maths"] == pytest.approx(2000, abs=3)


def test_a_limit_changes_nothing_before_it_is_reached() -> None:
    free, limited = Mixture(WEIGHTS, 3, 1, {}), Mixture(WEIGHTS, 3, 1, {"books": 700})
    end = limited.ends["books"]
    assert names_of(free, end) == names_of(limited, end)
    assert free.ends == {}


def test_the_samples_end_when_every_source_has_ended() -> None:
    mixture = Mixture({"web": 1, "code": 2}, 0, 0, {"web": 10, "code": 3})
    assert mixture.samples == 13
    assert sorted(names_of(mixture, 13)) == ["code"] * 3 + ["web"] * 10
    assert mixture.counts(13) == {"code": 3, "web": 10}


def test_a_source_without_samples_left_or_weight_gives_none() -> None:
    mixture = Mixture({"web": 1, "code": 2, "books": 0}, 0, 0, {"web": 0})
    assert set(names_of(mixture, 100)) == {"code"}
    assert mixture.ends == {"web": 0}
    assert Mixture({"web": 1}, 0, 0, {"web": 0}).samples == 0


def test_the_order_follows_seed_and_stage_and_never_changes() -> None:
    assert "".join(name[0] for name in names_of(Mixture(WEIGHTS, 0, 0, {}), len(FIRST))) == FIRST
    backwards = dict(reversed(WEIGHTS.items()))
    assert names_of(Mixture(backwards, 0, 0, {}), 500) == names_of(Mixture(WEIGHTS, 0, 0, {}), 500)
    orders = {tuple(names_of(Mixture(WEIGHTS, seed, stage, {}), 500)) for seed in (0, 1) for stage in (0, 1)}
    assert len(orders) == 4


def test_weights_may_have_any_sum() -> None:
    tenfold = {name: 8 * weight for name, weight in WEIGHTS.items()}
    assert names_of(Mixture(tenfold, 0, 0, {}), 500) == names_of(Mixture(WEIGHTS, 0, 0, {}), 500)


@given(
    epochs=st.integers(0, 40).map(lambda quarters: quarters / 4),
    tokens=st.integers(1, 10**12).map(lambda tokens: 4 * tokens),
    seq_len=st.integers(1, 1 << 20),
    first=st.integers(0, 10**13),
)
def test_samples_within_epochs_are_all_that_fit(epochs: float, tokens: int, seq_len: int, first: int) -> None:
    left = samples_within(epochs, tokens, seq_len, first)
    end = int(epochs * 4) * tokens // 4
    assert (first + left * seq_len <= end) if left else (first + seq_len > end)
    assert first + (left + 1) * seq_len > end


def test_a_far_sample_is_found_without_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make_chunk = Mixture._make_chunk
    monkeypatch.setattr(Mixture, "_make_chunk", lambda mixture, index: made.append(index) or make_chunk(mixture, index))
    mixture = Mixture(WEIGHTS, 0, 0, {"books": 1000})
    name, before = mixture.sample(10**9)
    assert mixture.counts(10**9)[name] == before
    assert made == [10**9 // CHUNK_SAMPLES]
