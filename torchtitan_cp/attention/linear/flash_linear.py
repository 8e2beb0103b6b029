"""flash-linear-attention's fused kernels for a rank's rows. No other file knows that package.

We use the initial and the final state of its public functions. A pass over a document's rows on this rank returns the
outputs and the state that leaves; its backward returns the gradients of the rows and of the state that enters. A, B and
G are passes too. Columns of a state do not depend on each other, so A is the final state of columns that start as the
identity and get no values. Names and semantics: `chunk_gated_delta_rule` and `chunk_kda` of fla-core 0.5 and 0.6.
"""

import importlib
import logging
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from torchtitan_cp.attention.caching import to_device
from torchtitan_cp.attention.compiling import with_autograd
from torchtitan_cp.attention.linear.states import INDEX_CACHE, DocumentSegment, Inputs, local_segments
from torchtitan_cp.attention.merge import accumulation_dtype
from torchtitan_cp.attention.plan import Plan

logger = logging.getLogger(__name__)

Rule = Callable[..., tuple[Tensor, Tensor]]  # of the package


@lru_cache(maxsize=1)
def find_rules() -> tuple[Rule, Rule] | None:
    """(its gated delta rule, its Kimi delta attention); None if the package is missing."""
    try:
        rules = [importlib.import_module(f"fla.ops.{name}") for name in ("gated_delta_rule", "kda")]
        return rules[0].chunk_gated_delta_rule, rules[1].chunk_kda
    except (ImportError, AttributeError) as error:
        logger.info("linear attention runs in torch, which is slower: no flash-linear-attention (%s)", error)
        return None


@lru_cache(maxsize=1)
def has_right_backward() -> bool:
    """Whether Triton compiles the package's backward of the gated delta rule correctly on this GPU.

    Triton 3.4 to 3.7.0 does not on Hopper. There fla 0.6 raises in the first backward, unless it finds tilelang
    (flash-linear-attention issue 640). Kimi's rule is not affected.
    """
    try:
        triton, on_hopper = TorchVersion(version("triton")), torch.cuda.get_device_capability()[0] == 9
    except PackageNotFoundError:
        return True  # a build of torch may call its Triton otherwise
    wrong = triton >= "3.4" and triton < "3.7.1" and on_hopper and not find_spec("tilelang")
    if wrong:
        logger.warning(
            f"gated delta nets run in torch, which is slower: Triton {triton} compiles their fused backward to wrong "
            "numbers on this GPU; pip install 'triton>=3.7.1' (torch brings it from 2.12.1 on), or tilelang"
        )
    return not wrong


def is_available(inputs: Inputs, plan: Plan) -> bool:
    """Whether the fused kernels can compute these rows: on CUDA, and in 16 bits, as they multiply fp32 less exactly."""
    fits = inputs.q.is_cuda and inputs.q.dtype.itemsize == 2 and inputs.q.shape[-1] <= 256
    fits = fits and len(inputs.q) > 0 and bool(local_segments(plan)) and find_rules() is not None
    return fits and (inputs.g.shape[-1] > 1 or has_right_backward())


class FlashKernel:
    """Computes segments with fla's fused kernels: what kernel.TorchKernel does in torch, with the same methods."""

    def __init__(self, inputs: Inputs, plan: Plan, scale: float, rule: str, dout: Tensor | None) -> None:
        self.inputs, self.scale, self.l2norm, self.dout = inputs, scale, rule == "normalized_delta", dout
        self.key_dim, self.segments = inputs.q.shape[-1], self._split_rows(local_segments(plan))
        (batch, _, heads, value_dim), dtype = inputs.v.shape, accumulation_dtype(inputs.q.dtype)
        self.zeros = inputs.v.new_zeros((batch, heads, self.key_dim, value_dim), dtype=dtype)

    def summarize(self, segment: DocumentSegment) -> Tensor:
        """A and B side by side, `[b, H, K, K + V]`, or only B: final states of the identity and of zeros."""
        segments, inputs, start = self._split_rows([segment]), self.inputs, self.zeros[segment.rows]
        if segment.offset:
            identity = torch.eye(self.key_dim, dtype=start.dtype, device=start.device)
            start = torch.cat([identity.expand(*start.shape[:2], -1, -1), start], -1)
            inputs = inputs._replace(v=F.pad(inputs.v, (self.key_dim, 0)))
        return self._run(inputs, segments, start)[1]

    def outputs(self, entering: Tensor) -> Tensor:
        """Outputs `[B, S/P, Hv, V]`, from the states that enter the runs, `[runs, B, H, K, V]`."""
        starts = self._states_of_segments([s.offset > 0 for s in self.segments], entering)
        rows, _ = self._run(self.inputs, self.segments, starts)
        out = torch.zeros_like(self.inputs.v)
        index, _ = self._row_index(self.segments)
        return out.flatten(0, 1).index_copy(0, index, rows[0].to(out.dtype)).view_as(out)

    def gradient_inside(self, segment: DocumentSegment) -> Tensor:
        """The gradient of the state that enters a segment from its own outputs, by autograd: `[b, H, K, V]`."""
        segments = self._split_rows([segment])
        assert self.dout is not None
        with with_autograd(), torch.enable_grad():
            start = self.zeros[segment.rows].requires_grad_()
            out, _ = self._run(self.inputs, segments, start)
            return torch.autograd.grad(out, start, self._select_rows(self.dout, segments))[0]

    def gradients(self, entering: Tensor, leaving: Tensor) -> list[Tensor]:
        """The gradients of the inputs, by autograd over one call of the kernels.

        Args:
            entering: states that enter the runs; leaving: gradients of those that leave them, `[runs, B, H, K, V]`.
        """
        assert self.dout is not None
        with with_autograd(), torch.enable_grad():
            leaves = Inputs(*(x.detach().requires_grad_() for x in self.inputs))
            starts = self._states_of_segments([s.offset > 0 for s in self.segments], entering)
            dlast = self._states_of_segments([s.continues for s in self.segments], leaving)
            results = self._run(leaves, self.segments, starts)
            return list(torch.autograd.grad(results, leaves, (self._select_rows(self.dout, self.segments), dlast)))

    def _run(self, inputs: Inputs, segments: list[DocumentSegment], start: Tensor) -> tuple[Tensor, Tensor]:
        """(outputs of these segments' rows one after the other, `[1, rows, Hv, V]`; their final states)."""
        q, k, v, g, beta = (self._select_rows(x, segments) for x in inputs)
        rule = (find_rules() or ())[g.shape[-1] > 1]
        return rule(
            *(q, k, v, g if g.shape[-1] > 1 else g.squeeze(-1), beta.squeeze(-1)),
            scale=self.scale,
            initial_state=start,
            output_final_state=True,
            use_qk_l2norm_in_kernel=self.l2norm,
            cu_seqlens=self._row_index(segments)[1],
        )

    def _split_rows(self, segments: list[DocumentSegment]) -> list[DocumentSegment]:
        """The segments of each batch row."""
        return [s._replace(row=row) for s in segments for row in range(len(self.inputs.q))[s.rows]]

    def _row_index(self, segments: list[DocumentSegment]) -> tuple[Tensor, Tensor]:
        """(indices of the segments' rows, one segment after the other; `[segments + 1]`, the rows before each)."""
        like, tokens = self.inputs.q, self.inputs.q.shape[1]

        def make() -> tuple[Tensor, Tensor]:
            rows = [torch.arange(s.tokens) + s.row * tokens + s.local for s in segments]
            before = torch.tensor([*accumulate((s.tokens for s in segments), initial=0)])
            return to_device(torch.cat(rows), like), to_device(before, like)

        return INDEX_CACHE.get(("rows of segments", tuple(segments), tokens), like, make)

    def _select_rows(self, x: Tensor, segments: list[DocumentSegment]) -> Tensor:
        return x.flatten(0, 1).index_select(0, self._row_index(segments)[0]).unsqueeze(0)

    def _states_of_segments(self, has_state: list[bool], states: Tensor) -> Tensor:
        """The state of each segment's run, or zeros where it has none, `[segments, H, K, V]`."""
        runs = [s.run * states.shape[1] + s.row for s in self.segments]

        def make() -> tuple[Tensor, Tensor]:
            return to_device(torch.tensor(runs), states), to_device(torch.tensor(has_state), states)

        index, mask = INDEX_CACHE.get(("states of segments", tuple(runs), tuple(has_state)), states, make)
        return torch.where(mask[:, None, None, None], states.flatten(0, 1).index_select(0, index), 0.0)
