"""The tensors of a bad step's culprit in a folder, as safetensors and JSON: enough to run it again on one process."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from torchtitan_cp.config import UserError

REPORT, TENSORS = "report.json", "tensors.safetensors"
PLANS = "plans"  # the argument of a block that says what may attend to what


class Capture:
    """Keeps what goes into one module in one micro-batch, and the gradient that comes back to it.

    Args:
        module: to watch.
        micro_batch: which of its forwards, from 0; those of activation checkpointing are not counted.

    Attributes:
        inputs: its positional arguments, tensors detached.
        output_gradients: by the place among its outputs.
    """

    def __init__(self, module: nn.Module, micro_batch: int) -> None:
        self.module, self.micro_batch = module, micro_batch
        self.inputs: list[Any] = []
        self.output_gradients: dict[int, Tensor] = {}
        self._forwards = 0

    def __enter__(self) -> "Capture":
        self._handle = self.module.register_forward_hook(self._keep)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handle.remove()

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        self._forwards += 1
        if self._forwards == self.micro_batch + 1:
            self.inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
            for place, x in enumerate(output if isinstance(output, tuple) else (output,)):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(
                        lambda gradient, place=place: self.output_gradients.update({place: gradient.clone()})
                    )


@dataclass
class Bundle:
    """What is written of a bad step.

    Attributes:
        report: what is known of it, plain JSON.
        tensors: by name: `input.N`, `output_gradient.N`, `weight.NAME`, `tokens`, `labels`, `positions`.
    """

    report: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write both files; the folder is made."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: x.detach().cpu().contiguous() for name, x in self.tensors.items()}, folder / TENSORS)
        (folder / REPORT).write_text(json.dumps(self.report, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Bundle":
        """Read what `write` wrote.

        Raises:
            UserError: a file is missing or is not what it should be.
        """
        try:
            report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
            return cls(report, load_file(folder / TENSORS))
        except Exception as error:  # safetensors raises its own, of a class it does not export
            raise UserError(
                f"{folder} is no bundle of a bad step ({type(error).__name__}: {error})",
                fix="give a folder that a run wrote under health/, e.g. outputs/run/health/step-120",
            ) from None

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names begin so, by the rest of the name."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}


def pack_arguments(inputs: list[Any], whole: Callable[[Tensor], Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
    """A module's arguments as JSON, and their tensors.

    Args:
        whole: (tensor of this rank) -> that of the whole sequence.
    """
    described: list[Any] = []
    tensors: dict[str, Tensor] = {}
    for place, x in enumerate(inputs):
        if isinstance(x, Tensor):
            tensors[f"input.{place}"] = whole(x)
            described.append(f"input.{place}")
        else:
            described.append(PLANS if isinstance(x, Mapping) else None)
    return described, tensors
