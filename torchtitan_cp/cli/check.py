"""`torchtitan-cp check` says whether a config would run on a number of ranks, or what is wrong with it."""

import logging
import shlex

from torchtitan_cp.cli.command import run_command
from torchtitan_cp.cli.options import add_rank_arguments, config_parser, parse_with_overrides, ranks_of
from torchtitan_cp.config import Config, ConfigError, load_config
from torchtitan_cp.config.check import shortened_warmups
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.training.preflight import check_before_corpus, check_files, find_unprepared_text
from torchtitan_cp.training.registry import config_for_hub
from torchtitan_cp.training.resolve import doctor_config, resolve_run
from torchtitan_cp.training.rope_log import log_rope_notes

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    about = "Say whether a config would run on so many ranks, or what is wrong with it (exit code 2)."
    parser = config_parser("check", about)
    add_rank_arguments(parser)
    parser.add_argument("--doctor", action="store_true", help="check the config as the doctor runs it")
    parser.add_argument("--parity", "--verify-parity", action="store_true", help="check it as that flag runs it")
    options, overrides = parse_with_overrides(parser, arguments)

    def check() -> int:
        ranks = ranks_of(options)
        config = load_config(options.config, overrides)
        config = doctor_config(config, ranks) if options.doctor else config
        trains = not (options.doctor or options.parity)
        print(f"{options.config}: {check_run(config, ranks, trains=trains)}")
        if trains and (text := find_unprepared_text(config)):
            command = shlex.join(["torchtitan-cp", "prepare", options.config, *overrides])
            print(f"to tokenize before the first step: {text}; without holding GPUs: {command}")
        return 0

    return run_command(check, options.config)


def check_run(config: Config, ranks: int, *, trains: bool = True) -> str:
    """Check a config, and return a line that says what would run.

    Args:
        trains: see `check_before_corpus`.

    Raises:
        UserError, ContextParallelError: the first problem found.
    """
    device = find_device().device.type
    run = resolve_run(config, ranks, device=device)
    config = run.config
    check_files(config, reads_corpus=trains)
    args = check_before_corpus(run, device, trains=trains)
    log_rope_notes(config, run.stages, args)
    for line in shortened_warmups(config, run.stages):
        logger.warning(line)
    for stage in run.stages:
        rope = stage.rope
        if rope and rope.kind == "yarn" and (reach := rope.factor * rope.original_seq_len) < stage.seq_len:
            logger.warning(
                f"{stage.where}.rope: factor x original_seq_len = {reach:.0f} is shorter than the "
                f"stage's seq_len = {stage.seq_len}"
            )
        try:
            if config.model.hub_checkpoint:
                config_for_hub(config.model, args, stage.seq_len, rope)
        except ConfigError as error:
            logger.warning("%s trains, but cannot be exported: %s", stage.where, error.message)
    lengths = " -> ".join(f"{stage.name} (cp {stage.cp})" for stage in run.stages)
    steps = sum(stage.steps for stage in run.stages)
    compiled = "compiled" if config.compile.enable else f"not compiled{run.uncompiled and f' ({run.uncompiled})'}"
    chunk = f"loss in chunks of {config.training.loss_chunk_tokens} tokens"
    return f"{steps} step{'s' * (steps > 1)} on {ranks} rank{'s' * (ranks > 1)}: {lengths}; {compiled}, {chunk}"
