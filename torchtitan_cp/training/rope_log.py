"""Logs how the rotary embeddings of a curriculum follow each other, beginning with the model's own."""

import logging
from collections.abc import Sequence
from contextlib import suppress

from torchtitan_cp.checkpoint.hub_rope import hub_rope
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.curriculum import ResolvedStage, rope_notes
from torchtitan_cp.training import registry

logger = logging.getLogger(__name__)


def log_rope_notes(config: Config, stages: Sequence[ResolvedStage], args: ModelArgs, first: int = 0) -> None:
    """Log what stages change in the rotary embedding, and which of them are longer and leave it as it was.

    Args:
        config: with defaults; its model may have a config.json that has a rotary embedding of its own.
        first: number of the first stage to log, from 0.
    """
    model, own, trained_tokens = config.model, None, 0
    if not args.rotary_dim:
        return
    if registry.has_hub_config(model):
        start = registry.start_config(model, args)
        with suppress(ConfigError):  # a kind that no stage can have
            own = hub_rope(start)
        if model.hub_checkpoint and model.load_weights:
            trained_tokens = start.get("max_position_embeddings") or 0
    windows = [mixer.window for mixer in args.mixers if mixer.n_heads]
    span_tokens = max(windows) if all(windows) else 0
    for note in rope_notes(stages, own, trained_tokens, span_tokens):
        if note.stage >= first:
            logger.log(logging.WARNING if note.warns else logging.INFO, "%s", note.text)
