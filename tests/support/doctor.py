"""The doctor of a config on a rank, and fourteen ways to break what stands between a model and its ranks."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from models import ARCHITECTURES
from models.huggingface.model import HuggingFaceModel
from tests.support.huggingface_families import FAMILIES
from tests.support.runs import TINY, write_run
from torchtitan_cp.attention import attend, causal_conv, gated_delta_rule
from torchtitan_cp.attention.linear.states import StateExchange
from torchtitan_cp.config import load_config
from torchtitan_cp.parallel.lora import LoRALinear
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training import model as training_model
from torchtitan_cp.training.doctor import run_doctor
from torchtitan_cp.training.model import LayerAttention, ParallelModel
from torchtitan_cp.training.registry import register

MODEL = 'architecture = "huggingface"\nconfig = "{folder}/config.json"'
HUGGING_FACE = TINY.replace(TINY[TINY.index('flavor = "debug"') : TINY.index("\n\n[tokenizer]")], MODEL)


def write_family(folder: Path, family: str) -> Path:
    """A config that trains a tiny model of a family of transformers."""
    (folder / "config.json").write_text(json.dumps(FAMILIES[family]))
    return write_run(folder, HUGGING_FACE)


def diagnose(path: Path, fault: str = "", *overrides: str) -> tuple[bool, str]:
    """On a rank: whether the model is safe, and what is printed."""
    register(ARCHITECTURES)
    printed = StringIO()
    with FAULTS[fault]() if fault else nullcontext(), redirect_stdout(printed):
        return run_doctor(load_config(path, overrides), start_ranks(60.0), 0), printed.getvalue()


def _attention(change: Callable[..., Any]) -> Any:
    """`change` gets (plan of the layer, window, options) and may change the options; it returns the plan."""

    def attention(self: Any, q: Tensor, k: Tensor, v: Tensor, plans: Any, window: int, **options: Any) -> Tensor:
        plan = change(plans, window, options)
        return attend(q, k, v, plan, **options)

    return patch.object(LayerAttention, "__call__", attention)


def _lose(option: str) -> Any:
    def lose(plans: Any, window: int, options: Any) -> Any:
        options.pop(option, None)
        return plans[window]

    return _attention(lose)


def _mix_documents(plans: Any, window: int, options: Any) -> Any:
    plan = plans[window]
    return dataclasses.replace(plan, mask=dataclasses.replace(plan.mask, document_lengths=None))


def _built(change: Callable[[HuggingFaceModel], None]) -> Any:
    """Every model is changed after it is built."""
    build = HuggingFaceModel.__init__

    def built(self: HuggingFaceModel, *arguments: Any) -> None:
        build(self, *arguments)
        change(self)

    return patch.object(HuggingFaceModel, "__init__", built)


def _mix_neighbours(model: HuggingFaceModel) -> None:
    mlp: Any = model.layers["1"].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + F.pad(x, (0, 0, 1, 0))[:, :-1]


def _mix_neighbours_in_adapters() -> Any:
    forward = LoRALinear.forward

    def mixed(self: LoRALinear, x: Tensor) -> Tensor:
        out = forward(self, x)
        return out + F.pad(out, (0, 0, 1, 0))[:, :-1]

    return patch.object(LoRALinear, "forward", mixed)


def _attend_within_shards(model: HuggingFaceModel) -> None:
    def own(q: Tensor, k: Tensor, v: Tensor, *plans: Any, **options: Any) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)

    model.layers["1"].self_attn.attend = own  # type: ignore[union-attr]


def _count_positions() -> Any:
    forward = HuggingFaceModel.forward

    def counted(self: Any, tokens: Tensor, positions: Tensor, *others: Any) -> Any:
        return forward(self, tokens, torch.arange(tokens.shape[1]), *others)

    return patch.object(HuggingFaceModel, "forward", counted)


def _shard_twice() -> Any:
    train_part = ParallelModel._train_part

    def halved(self: Any, divisor: Any, loss_sum: Any, forward: Any, hidden: Any, batch: Any) -> Any:
        cut = {name: getattr(batch, name)[..., ::2] for name in ("tokens", "labels", "positions")}
        return train_part(self, divisor, loss_sum, forward, hidden, dataclasses.replace(batch, **cut))

    return patch.object(ParallelModel, "_train_part", halved)


def _lose_state() -> Any:
    """Ranks begin every run with a state of zeros."""
    enter = StateExchange.enter

    def forget(self: Any, summarize: Any) -> tuple[Tensor, Tensor]:
        states, maps = enter(self, summarize)
        return torch.zeros_like(states), maps

    return patch.object(StateExchange, "enter", forget)


def _convolve_over_documents() -> Any:
    """The convolution of ranks does not know where documents begin."""

    def convolve(self: Any, x: Tensor, weight: Tensor, plans: Any, **options: Any) -> Tensor:
        return causal_conv(x, weight, _mix_documents(plans, 0, {}), **options)

    return patch.object(LayerAttention, "causal_conv", convolve)


def _swap_gates() -> Any:
    """On ranks each head has the gates of the next one. Some kernels' backward read those of the first for all."""

    def rule(self: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plans: Any, **options: Any) -> Tensor:
        return gated_delta_rule(q, k, v, g.roll(1, 2) if plans[0].ranks > 1 else g, beta, plans[0], **options)

    return patch.object(LayerAttention, "gated_delta_rule", rule)


FAULTS: dict[str, Callable[[], Any]] = {
    "window": lambda: _attention(lambda plans, window, options: plans[0]),
    "sink": lambda: _lose("sinks"),
    "cap": lambda: _lose("softcap"),
    "scale": lambda: _lose("scale"),
    "documents": lambda: _attention(_mix_documents),
    "positions": _count_positions,
    "recurrence": lambda: _built(_mix_neighbours),
    "adapters": _mix_neighbours_in_adapters,
    "twice": _shard_twice,
    "average": lambda: patch.object(training_model.dist, "all_reduce", lambda tokens: tokens),
    "unreached": lambda: _built(_attend_within_shards),
    "state": _lose_state,
    "convolution": _convolve_over_documents,
    "gates": _swap_gates,
}
