"""Whole training steps by length, this trainer beside a plain Hugging Face loop, in turns step by step."""

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import Run, start_ranks, take_turn
from models import ARCHITECTURES
from models.llama import FLAVORS
from torchtitan_cp.config import Config, load_config
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.runtime.device import World, find_device
from torchtitan_cp.runtime.device import start_ranks as join_ranks
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.trainer import Trainer

CORES, VOCABULARY, STEP_TOKENS, PATIENCE_SECONDS = 2, 4096, 8192, 3600.0
ENDLESS = 1000  # steps: a run is over when no turn is left
OURS = f'flavor = "debug"\noverrides = {{vocab_size = {VOCABULARY}}}'
MIXTURE = OURS + '\narchitecture = "moe"\n[parallel]\nep = '

CONFIG = """
[job]
dump_folder = "{folder}"
[model]
{model}
[tokenizer]
kind = "bytes"
[data]
source = "python-stdlib"
document = "folder"
cache_folder = "{cache}"
validation_fraction = 0.0
[training]
compute_dtype = "float32"
micro_batch_sequences = {sequences}
[checkpoint]
enable = false
[[curriculum.stages]]
seq_len = {length}
steps = {steps}
global_batch_tokens = {tokens}
cp = {cp}
strategy = "{strategy}"
[compile]
enable = {compiled}
"""


class InTurns(Trainer):
    """Waits before each step until it is its turn, and answers with what the last one took."""

    def __init__(self, config: Config, world: World, watch: "Watch") -> None:
        super().__init__(config, world)
        self.watch = watch

    def _step(self, stage: ResolvedStage, batches: Iterator[Any]) -> bool:
        self.watch.turn()
        return super()._step(stage, batches)


class Watch:
    """Times turns, and the memory they took at most beyond what was resident."""

    def __init__(self) -> None:
        self.resident = reset_peak()
        self.begun = time.perf_counter()

    def turn(self) -> None:
        """End a turn, and begin the next when asked to."""
        seconds = time.perf_counter() - self.begun
        take_turn((seconds, find_device().peak_memory_bytes() - self.resident))
        self.begun = time.perf_counter()


def ours(length: int, folder: str, cache: str, strategy: str, compiled: bool = False, model: str = OURS) -> Run:
    """This trainer with all that it does beside a step; ranks read different sequences where there are enough."""
    ranks, tokens = dist.get_world_size(), max(length, STEP_TOKENS)
    cp = 1 if tokens // length >= ranks else ranks
    sequences = max(1, tokens // length * cp // ranks)
    register(ARCHITECTURES)

    def run() -> None:
        path = Path(folder) / f"{dist.get_rank()}.toml"
        values = {"length": length, "steps": ENDLESS, "cache": cache, "strategy": strategy, "cp": cp, "tokens": tokens}
        values |= {"model": model, "sequences": sequences, "compiled": str(compiled).lower()}
        path.write_text(CONFIG.format(folder=Path(folder) / "run", **values))
        watch = Watch()
        InTurns(load_config(path), join_ranks(PATIENCE_SECONDS), watch).run()

    return run


def ours_of_transformers(length: int, folder: str, cache: str, strategy: str, compiled: bool = False) -> Run:
    """This trainer with transformers' Llama in place of its own."""
    llama_config(length).save_pretrained(folder)
    model = f'architecture = "huggingface"\nconfig = "{folder}"'
    return ours(length, folder, cache, strategy, compiled, model)


def llama_config(length: int) -> Any:
    """The debug Llama as transformers describes it."""
    library: Any = importlib.import_module("transformers")
    size = FLAVORS["debug"]
    return library.LlamaConfig(
        hidden_size=size.dim,
        num_hidden_layers=size.n_layers,
        num_attention_heads=size.n_heads,
        num_key_value_heads=size.n_kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.ffn_dim,
        vocab_size=VOCABULARY,
        tie_word_embeddings=size.tie_embeddings,
        rms_norm_eps=size.norm_eps,
        max_position_embeddings=length,
        attn_implementation="sdpa",
        use_cache=False,
    )


def hugging_face(length: int, folder: str, cache: str, strategy: str, compiled: bool = False) -> Run:
    """LlamaForCausalLM: SDPA, its own loss."""
    library: Any = importlib.import_module("transformers")

    def make() -> tuple[nn.Module, LossOf]:
        model = library.LlamaForCausalLM(llama_config(length))
        run_model: Any = torch.compile(model) if compiled else model
        return model, lambda ids: run_model(input_ids=ids, labels=ids).loss

    return plain_loop(make, length)


def torchtitan(length: int, folder: str, cache: str, strategy: str) -> Run:
    """torchtitan's Llama 3 and loss: SDPA, an output matrix of its own. Up to 0.2: later ones have no SDPA."""
    library: Any = importlib.import_module("torchtitan.models.llama3.model.model")
    arguments: Any = importlib.import_module("torchtitan.models.llama3.model.args")
    loss: Any = importlib.import_module("torchtitan.components.loss").cross_entropy_loss
    size = FLAVORS["debug"]
    settings = arguments.TransformerModelArgs(
        dim=size.dim,
        n_layers=size.n_layers,
        n_heads=size.n_heads,
        n_kv_heads=size.n_kv_heads,
        vocab_size=VOCABULARY,
        multiple_of=size.ffn_dim,  # to which two thirds of 4 x 192 are rounded up
        max_seq_len=length,
    )

    def make() -> tuple[nn.Module, LossOf]:
        model = library.Transformer(settings)
        with torch.no_grad():
            model.init_weights()
        return model, lambda ids: loss(model(ids), ids.roll(-1, 1)) / ids.numel()

    return plain_loop(make, length)


LossOf = Callable[[Tensor], Tensor]


def plain_loop(make: Callable[[], tuple[nn.Module, LossOf]], length: int) -> Run:
    """The loop of any tutorial: random tokens, AdamW, clipped gradients."""

    def run() -> None:
        watch = Watch()
        model, loss_of = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        while True:
            watch.turn()
            loss_of(torch.randint(VOCABULARY, (max(1, STEP_TOKENS // length), length))).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def reset_peak() -> int:
    """Count peak memory from here; what is resident now, in bytes."""
    device = find_device()
    device.reset_peak_memory()
    return device.peak_memory_bytes()


TRANSFORMERS = "torchtitan_cp with transformers' Llama"
EXPERTS = "moe, 2 ranks"
# name -> (what runs, ranks, threads of each)
CONTENDERS: dict[str, tuple[Callable[..., Run], int, int]] = {
    "torchtitan_cp, 2 ranks": (ours, CORES, 1),
    "torchtitan_cp, 2 ranks, compiled": (partial(ours, compiled=True), CORES, 1),
    "torchtitan_cp, 1 rank": (ours, 1, CORES),
    "torchtitan_cp, 1 rank, compiled": (partial(ours, compiled=True), 1, CORES),
    "torchtitan's Llama, plain loop": (torchtitan, 1, CORES),
    "Hugging Face loop, compiled": (partial(hugging_face, compiled=True), 1, CORES),
    "Hugging Face loop": (hugging_face, 1, CORES),
    f"{TRANSFORMERS}, 2 ranks": (ours_of_transformers, CORES, 1),
    f"{TRANSFORMERS}, 2 ranks, compiled": (partial(ours_of_transformers, compiled=True), CORES, 1),
    f"{TRANSFORMERS}, 1 rank": (ours_of_transformers, 1, CORES),
    f"{TRANSFORMERS}, 1 rank, compiled": (partial(ours_of_transformers, compiled=True), 1, CORES),
    f"{EXPERTS}, ep 2": (partial(ours, model=MIXTURE + "2"), CORES, 1),
    f"{EXPERTS}, experts gathered": (partial(ours, model=MIXTURE + "1"), CORES, 1),
}
STANDARD = [name for name in CONTENDERS if TRANSFORMERS not in name and EXPERTS not in name]


def guarded(name: str, *arguments: Any) -> Run:
    """A contender's run, or one that answers with why there is none."""
    try:
        return CONTENDERS[name][0](*arguments)
    except ImportError as error:
        reason = str(error)
        return lambda: reason


def measure(lengths: list[int], contenders: list[str], strategy: str, rounds: int, cache: str) -> Iterator[Row]:
    """The debug Llama, fp32, the same tokens a step, on two cores; a step of each in turn, rounds times.

    over_last: the median of the rounds' own ratios; the first step is not counted. peak_mib: of all processes, beyond
    what they held before. A contender that is not installed is named with the reason and left out; ratios are over the
    last that runs. Other contenders: transformers' Llama in this trainer (architecture = "huggingface"), and the debug
    mixture with experts shared by the ranks or gathered on each.
    """
    for length in lengths:
        with ExitStack() as stack:
            groups = {name: stack.enter_context(start_ranks(*CONTENDERS[name][1:])) for name in contenders}
            for name, group in list(groups.items()):
                folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                group.make(guarded, name, length, folder, cache, strategy)
                reason = group.answer()[0]
                if isinstance(reason, str):
                    del groups[name]
                    yield {"length": length, "loop": name, "does_not_run": reason}
            turns = [{name: group.answer() for name, group in groups.items()} for _ in range(rounds)]
        times = {name: [max(seconds for seconds, _ in turn[name]) for turn in turns] for name in groups}
        if not times:
            continue
        last = list(times.values())[-1]
        for name, own in times.items():
            yield {
                "length": length,
                "loop": name,
                "tokens_per_second": max(length, STEP_TOKENS) / statistics.median(own),
                "over_last": statistics.median(theirs / ours for theirs, ours in zip(last, own, strict=True)),
                "over_last_of_fastest": min(last) / min(own),
                "peak_mib": sum(peak for _, peak in turns[-1][name]) / 2**20,
            }


BENCHMARK = Benchmark(
    measure,
    {
        "lengths": [1024, 4096, 16384, 32768],
        "contenders": STANDARD,
        "strategy": "auto",
        "rounds": 5,
        "cache": "outputs/cache",
    },
    {
        "lengths": [1024],
        "contenders": [name for name in STANDARD if "compiled" not in name],
        "rounds": 1,
    },
    {"contenders": list(CONTENDERS)},
)
