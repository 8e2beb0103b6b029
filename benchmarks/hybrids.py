"""A step of transformers' Qwen3.5 beside one of ours, of the same sizes, in turns in one process."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.benchmark import Benchmark, Row
from models.architecture import LanguageModel
from models.huggingface.args import HuggingFaceArgs, args_from_config
from models.huggingface.model import HuggingFaceModel
from models.qwen3_5 import FLAVORS, Hybrid, HybridArgs
from models.qwen3_5.hub import config as hub_config
from torchtitan_cp.attention import make_plan
from torchtitan_cp.training.model import LayerAttention, set_rope

VOCABULARY = 4096


def sizes(length: int) -> tuple[HybridArgs, HuggingFaceArgs]:
    """The debug flavor, ours and as transformers' config.json describes it."""
    ours = replace(FLAVORS["debug"], vocab_size=VOCABULARY)
    described = {"model_type": "qwen3_5_text", "vocab_size": VOCABULARY, "max_position_embeddings": length}
    return ours, args_from_config({**hub_config(ours), **described}, {})


def make_step(model: LanguageModel, args: HybridArgs | HuggingFaceArgs, length: int) -> Callable[[], float]:
    """A forward and backward on one document; returns the seconds that the process computed."""
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.5 if name.endswith("norm.weight") else 0.0, 0.02)
    set_rope(model, args, None, length, torch.device("cpu"))
    plans, tokens = {0: make_plan(length)}, torch.randint(VOCABULARY, (1, length))

    def step() -> float:
        begun = time.process_time()
        logits = model(tokens, torch.arange(length)[None], plans)
        assert isinstance(logits, torch.Tensor)
        logits.logsumexp(-1).mean().backward()
        model.zero_grad(set_to_none=True)
        return time.process_time() - begun

    return step


def measure(lengths: list[int], rounds: int) -> Iterator[Row]:
    """The debug Qwen3.5, fp32, one thread; forward and backward, the two models in turns, the first turn not counted.

    Times are the process's own, so that other processes take no part in them. transformers_over_ours: tokens a second,
    the median of the rounds' own ratios, and of the fastest steps.
    """
    torch.set_num_threads(1)
    for length in lengths:
        ours, theirs = sizes(length)
        steps = [
            make_step(Hybrid(ours, LayerAttention()), ours, length),
            make_step(HuggingFaceModel(theirs, LayerAttention()), theirs, length),
        ]
        turns = [[step() for step in steps] for _ in range(rounds + 1)][1:]
        native, transformers = (list(times) for times in zip(*turns, strict=True))
        yield {
            "length": length,
            "ours_tokens_per_second": length / statistics.median(native),
            "transformers_tokens_per_second": length / statistics.median(transformers),
            "transformers_over_ours": statistics.median(a / b for a, b in turns),
            "of_the_fastest": min(native) / min(transformers),
        }


BENCHMARK = Benchmark(measure, {"lengths": [1024, 4096], "rounds": 8}, {"lengths": [256], "rounds": 2})
