"""How fast one worker reads sequences and plans their attention: `python -m benchmarks.loader`."""

import argparse
import json
import platform
import time
from functools import partial
from pathlib import Path

from torchtitan_cp.attention import make_plan
from torchtitan_cp.config.sections import Data, Tokenizer
from torchtitan_cp.data import TokenStream, prepare
from torchtitan_cp.data.loader import StepShape, read_step
from torchtitan_cp.data.packing import Packing
from torchtitan_cp.data.samples import Sampling, StageSamples

PACKINGS = {
    "concat": Packing("concat", 1, document_mask=False, restart_positions=False),
    "concat, documents masked": Packing("concat", 1, document_mask=True, restart_positions=True),
    "best_fit, documents masked": Packing("best_fit", 64, document_mask=True, restart_positions=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 65536, 1048576])
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks that the plans are for")
    parser.add_argument("--tokens", type=int, default=1 << 24, help="read for each figure")
    parser.add_argument("--cache", default="outputs/cache", help="folder of the embedded corpus's tokens")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    corpus = prepare(Data(cache_folder=options.cache, document="folder"), Tokenizer())
    streams = {
        name: TokenStream(source.train, max(options.lengths), 0, order="related")
        for name, source in corpus.sources.items()
    }
    print(f"{platform.machine()}, one process, plans for cp {options.cp}; million tokens a second\n")
    print("| packing | " + " | ".join(f"{length:,}" for length in options.lengths) + " |")
    print("|---|" + "---|" * len(options.lengths))
    rows = []
    for name, packing in PACKINGS.items():
        speeds = []
        for length in options.lengths:
            steps = max(2, options.tokens // length)
            sampling = Sampling({name: 1.0 for name in streams}, packing, 0, 0, 0, 0, {})
            samples = StageSamples(streams, length, sampling, 0, 0, 1, {}, steps + 1)
            shape = StepShape(length, 1, 1, 1, 0, partial(make_plan, ranks=options.cp))
            read_step(samples, shape, steps)  # what is made once
            begun = time.perf_counter()
            for step in range(steps):
                for batch in read_step(samples, shape, step):
                    assert batch.plan.steps
            speeds.append(steps * length / (time.perf_counter() - begun))
        rows.append({"packing": name, "tokens_per_second": dict(zip(options.lengths, speeds, strict=True))})
        print(f"| {name} | " + " | ".join(f"{speed / 1e6:.2f}" for speed in speeds) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
