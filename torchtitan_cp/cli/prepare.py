"""`torchtitan-cp prepare` makes what a run needs and no rank has to make: downloads, tokenizer, tokens, statistics."""

import logging
import sys
from collections.abc import Callable

from torchtitan_cp.cli.command import run_command
from torchtitan_cp.cli.options import at_least, config_parser, parse_with_overrides
from torchtitan_cp.config import Config, load_config
from torchtitan_cp.config.check import check_stages
from torchtitan_cp.config.data import check_sources
from torchtitan_cp.data.corpus.cache import CacheBuilder, open_cache
from torchtitan_cp.data.corpus.statistics import statistics_table
from torchtitan_cp.data.corpus.tokenizer import usable_cores, vocabulary_size
from torchtitan_cp.runtime.signals import StopSignals
from torchtitan_cp.training import registry
from torchtitan_cp.training.preflight import check_hub_tokenizer, check_hub_weights, fit_vocabulary
from torchtitan_cp.training.resolve import ResolvedRun, with_defaults


def main(arguments: list[str]) -> int:
    parser = config_parser(
        "prepare",
        "Download and tokenize what a config trains on, on a machine that needs no GPU; a run that finds it begins at "
        "once. After a stop or a kill the same command continues.",
    )
    parser.add_argument(
        "--workers",
        type=at_least(1),
        metavar="N",
        default=usable_cores(),
        help="processes that tokenize (default: one for each core)",
    )
    options, overrides = parse_with_overrides(parser, arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    def work() -> int:
        config = load_config(options.config, overrides)
        signals = StopSignals()
        with signals:
            prepare(config, options.workers, lambda: signals.received is not None)
        return 0

    return run_command(work, options.config)


def prepare(config: Config, workers: int, stop_requested: Callable[[], bool]) -> None:
    """Make what a run of the config would, before it builds its model, and print the corpus's statistics.

    Raises:
        UserError: as the run would, in the same order.
        PreparationStoppedError: a stop was requested.
    """
    check_stages(config)
    config = with_defaults(config)
    check_sources(config.data, has_tokenizer=not config.tokenizer.trained)
    run = ResolvedRun(config, ranks=1, stages=(), model_args=registry.model_args_of(config.model))
    check_hub_tokenizer(config)
    args = fit_vocabulary(run, vocabulary_size(config.tokenizer))
    check_hub_weights(config, args, download=True)
    start = registry.start_folder(config.model)
    locations = CacheBuilder(config.data, config.tokenizer, stop_requested, start, workers).build()
    corpus = open_cache(locations, config.data, config.tokenizer)
    fit_vocabulary(run, corpus.tokenizer.vocab_size)
    print(statistics_table({name: source.statistics for name, source in corpus.sources.items()}))
    print(f"prepared in {config.data.cache_folder}: a run of this config begins at once")
