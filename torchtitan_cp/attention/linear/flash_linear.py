"""flash-linear-attention's fused kernels for a rank's rows; the only place that knows that package.

Of its public functions the first state and the last one are used: over a document's rows on this rank a pass gives the
outputs and the state that leaves, and its backward the gradients of both ends. A, B and G are passes too: columns of a
state do not know each other, so that A is the last state of columns that begin as the identity and get no values.
Names and semantics: `chunk_gated_delta_rule` and `chunk_kda` of fla-core 0.5 and 0.6.
"""

import importlib
import logging
import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_cp.attention.caching import to_device
from torchtitan_cp.attention.compiling import with_autograd
from torchtitan_cp.attention.linear.states import ROWS, DocumentSegment, Inputs, own_segments
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def find_rules() -> tuple[Any, Any] | None:
    """(its gated delta rule, its Kimi delta attention), or None where the package is missing."""
    try:
        rules = [importlib.import_module(f"fla.ops.{name}") for name in ("gated_delta_rule", "kda")]
        return rules[0].chunk_gated_delta_rule, rules[1].chunk_kda
    except (ImportError, AttributeError) as error:
        logger.info("linear attention runs in torch, which is slower: no flash-linear-attention (%s)", error)
        return None


@lru_cache(maxsize=1)
def has_right_backward() -> bool:
    """Whether Triton compiles the backward of its gated delta rule to right numbers on this GPU; not Kimi's.

    From 3.4 to 3.7.0 it does not on Hopper, so that fla 0.6 raises there in the first backward, unless it finds
    tilelang (flash-linear-attention issue 640).
    """
    try:
        release = tuple(int(part) for part in re.findall(r"\d+", version("triton"))[:3])
    except PackageNotFoundError:
        return True  # and no fla either
    wrong = (3, 4) <= release < (3, 7, 1) and torch.cuda.get_device_capability()[0] == 9 and not find_spec("tilelang")
    if wrong:
        logger.warning(
            f"gated delta nets run in torch, which is slower: Triton {'.'.join(map(str, release))} compiles their "
            "fused backward to wrong numbers on this GPU; install tilelang, or Triton 3.7.1 or later"
        )
    return not wrong


def is_available(inputs: Inputs, plan: Plan) -> bool:
    """Whether the fused kernels take these rows: on CUDA, in 16 bits, as they multiply fp32 in fewer."""
    fits = inputs.q.is_cuda and inputs.q.dtype.itemsize == 2 and inputs.q.shape[-1] <= 256
    fits = fits and len(inputs.q) > 0 and bool(own_segments(plan)) and find_rules() is not None
    return fits and (inputs.g.shape[-1] > 1 or has_right_backward())


class FlashKernel:
    """See kernel.TorchKernel."""

    def __init__(self, inputs: Inputs, plan: Plan, scale: float, rule: str, dout: Tensor | None) -> None:
        self.inputs, self.scale, self.l2norm, self.dout = inputs, scale, rule == "normalized_delta", dout
        self.key_dim, self.segments = inputs.q.shape[-1], self._by_row(own_segments(plan))
        (batch, _, heads, value_dim), dtype = inputs.v.shape, accumulation_dtype(inputs.q.dtype)
        self.zeros = inputs.v.new_zeros((batch, heads, self.key_dim, value_dim), dtype=dtype)

    def summarize(self, segment: DocumentSegment) -> Tensor:
        """See TorchKernel."""
        segments, inputs, start = self._by_row([segment]), self.inputs, self.zeros[segment.rows]
        if segment.offset:
            identity = torch.eye(self.key_dim, dtype=start.dtype, device=start.device)
            start = torch.cat([identity.expand(*start.shape[:2], -1, -1), start], -1)
            inputs = inputs._replace(v=F.pad(inputs.v, (self.key_dim, 0)))
        return self._run(inputs, segments, start)[1]

    def outputs(self, entering: Tensor) -> Tensor:
        """See TorchKernel."""
        rows, _ = self._run(self.inputs, self.segments, self._at([s.offset > 0 for s in self.segments], entering))
        whole = torch.zeros_like(self.inputs.v)
        index, _ = self._places(self.segments)
        return whole.flatten(0, 1).index_copy(0, index, rows[0].to(whole.dtype)).view_as(whole)

    def gradient_inside(self, segment: DocumentSegment) -> Tensor:
        """See TorchKernel."""
        segments = self._by_row([segment])
        with with_autograd(), torch.enable_grad():
            start = self.zeros[segment.rows].requires_grad_()
            out, _ = self._run(self.inputs, segments, start)
            return torch.autograd.grad(out, start, self._rows(self.dout, segments))[0]

    def gradients(self, entering: Tensor, leaving: Tensor) -> list[Tensor]:
        """See TorchKernel."""
        with with_autograd(), torch.enable_grad():
            leaves = Inputs(*(x.detach().requires_grad_() for x in self.inputs))
            ends = self._run(leaves, self.segments, self._at([s.offset > 0 for s in self.segments], entering))
            dends = self._rows(self.dout, self.segments), self._at([s.continues for s in self.segments], leaving)
            return list(torch.autograd.grad(ends, leaves, dends))

    def _run(self, inputs: Inputs, segments: list[DocumentSegment], start: Tensor) -> tuple[Tensor, Tensor]:
        """(outputs of these segments' rows one after the other, `[1, rows, Hv, V]`, their last states)."""
        q, k, v, g, beta = (self._rows(x, segments) for x in inputs)
        rule = (find_rules() or ())[g.shape[-1] > 1]
        return rule(
            *(q, k, v, g if g.shape[-1] > 1 else g.squeeze(-1), beta.squeeze(-1)),
            scale=self.scale,
            initial_state=start,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.l2norm,
            cu_seqlens=self._places(segments)[1],
        )

    def _by_row(self, segments: list[DocumentSegment]) -> list[DocumentSegment]:
        """One for each batch row."""
        return [one._replace(row=row) for one in segments for row in range(len(self.inputs.q))[one.rows]]

    def _places(self, segments: list[DocumentSegment]) -> tuple[Tensor, Tensor]:
        """(the rows of segments, one after the other; `[segments + 1]`, how many there are before each)."""
        like, tokens = self.inputs.q, self.inputs.q.shape[1]

        def make() -> tuple[Tensor, Tensor]:
            rows = [torch.arange(s.tokens) + s.row * tokens + s.local for s in segments]
            before = torch.tensor([*accumulate((s.tokens for s in segments), initial=0)])
            return to_device(torch.cat(rows), like), to_device(before, like)

        return ROWS.get(("places", tuple(segments), tokens), like, make)

    def _rows(self, x: Tensor | None, segments: list[DocumentSegment]) -> Tensor:
        assert x is not None
        return x.flatten(0, 1).index_select(0, self._places(segments)[0]).unsqueeze(0)

    def _at(self, places: list[bool], states: Tensor) -> Tensor:
        """Those of each segment's run, or zeros, `[segments, H, K, V]`."""
        where = [s.run * states.shape[1] + s.row for s in self.segments]

        def make() -> tuple[Tensor, Tensor]:
            return to_device(torch.tensor(where), states), to_device(torch.tensor(places), states)

        index, wanted = ROWS.get(("states", tuple(where), tuple(places)), states, make)
        return torch.where(wanted[:, None, None, None], states.flatten(0, 1).index_select(0, index), 0.0)
