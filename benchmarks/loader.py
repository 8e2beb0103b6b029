"""How fast one worker reads sequences and plans their attention."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks.benchmark import Benchmark, Row
from torchtitan_cp.attention import make_plan
from torchtitan_cp.config.data import Data, ResolvedStageData
from torchtitan_cp.config.sections import Tokenizer
from torchtitan_cp.data.batches.micro_batches import BatchLayout, read_step
from torchtitan_cp.data.batches.samples import StageSamples
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.data.corpus.cache import prepare

PACKINGS = {
    "concat": ResolvedStageData({}, "concat", 1, document_mask=False, restart_positions=False),
    "concat, documents masked": ResolvedStageData({}, "concat", 1, document_mask=True, restart_positions=True),
    "best_fit, documents masked": ResolvedStageData({}, "best_fit", 64, document_mask=True, restart_positions=True),
}


def measure(lengths: list[int], cp: int, tokens: int, cache: str) -> Iterator[Row]:
    """Million tokens a second at each length, of the embedded corpus, whose tokens are kept in `cache`.

    cp: context-parallel ranks that the plans are for; tokens: read for each figure.
    """
    corpus = prepare(Data(cache_folder=cache, document="folder"), Tokenizer())
    streams = {
        name: TokenStream(source.train, max(lengths), 0, order="related") for name, source in corpus.sources.items()
    }
    for name, packing in PACKINGS.items():
        row: Row = {"packing": name}
        for length in lengths:
            steps = max(2, tokens // length)
            data = replace(packing, mixture={source: 1.0 for source in streams})
            samples = StageSamples(streams, length, data, 0, 0, 1, {}, steps + 1)
            shape = BatchLayout(length, 1, 1, 1, 0, partial(make_plan, ranks=cp))
            read_step(samples, shape, steps)  # what is made once
            begun = time.perf_counter()
            for step in range(steps):
                for batch in read_step(samples, shape, step):
                    assert batch.plan.steps
            row[f"{length:,}"] = steps * length / (time.perf_counter() - begun) / 1e6
        yield row


BENCHMARK = Benchmark(
    measure,
    {"lengths": [4096, 65536, 1048576], "cp": 2, "tokens": 1 << 24, "cache": "outputs/cache"},
    {"lengths": [4096, 65536], "tokens": 1 << 20},
)
