"""The public face: ContextParallel, and the functions behind it for callers that hold only a plan."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import index

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_cp.attention.codec import CODECS
from torchtitan_cp.attention.collectives import gather, open_groups
from torchtitan_cp.attention.errors import PlanError, check_name
from torchtitan_cp.attention.kernels import check_kernel
from torchtitan_cp.attention.layouts import NODE_RANKS, check_layout, make_layout
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.operator import attention, check_scale
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.ring_cost import ROW_PAIRS, RowPairs
from torchtitan_cp.attention.strategies import STRATEGIES, check_strategy, ranks_trading_heads

# Per format of q, k and v: the functions to [B, S/P, H, D] and back.
FORMATS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "bshd": (lambda x: x, lambda x: x),
    "sbhd": (lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1)),
    "thd": (lambda x: x.unsqueeze(0), lambda x: x.squeeze(0)),
}


def make_plan(
    seq_len: int,
    *,
    mask: AttentionMask | None = None,
    ranks: int = 1,
    rank: int = 0,
    strategy: str = "auto",
    kernel: str = "auto",
    layout: str = "auto",
    like: Plan | None = None,
    all_to_all_ranks: int = 1,
    kv_transfer: str = "exact",
    ranks_per_node: int = NODE_RANKS,
    row_pairs: RowPairs = ROW_PAIRS,
    groups: tuple[str, ...] = (),
) -> Plan:
    """Work out one rank's plan from integers alone, for example in a loader's worker or a test.

    Args:
        seq_len: S, in tokens.
        mask: default causal, one document.
        ranks: P, size of the context-parallel group; rank: this rank's number in it.
        strategy, kernel, layout, kv_transfer: by name, as for ContextParallel.
        like: another layer's plan, whose layout this one takes.
        all_to_all_ranks: for hybrid, the size of the inner groups; all_to_all sets it to P.
        ranks_per_node, row_pairs: as for ContextParallel.
        groups: names of the process groups, see Plan; none for a plan that is only inspected.

    Returns:
        The plan of `rank`. Equal arguments give equal plans, which share their tiles. Where no ranks would exchange
        heads, its strategy is the ring.

    Raises:
        LayoutError: S does not divide as the layout needs.
        PlanError: S is not an integer, the mask does not fit the sequence, `rank` is outside the group, or options
            exclude each other.
    """
    try:
        seq_len = index(seq_len)  # an integer of numpy or torch as Python's
    except TypeError:
        raise PlanError(f"seq_len = {seq_len} is not an integer", fix="give the length in tokens") from None
    mask = mask or AttentionMask()
    mask.documents(seq_len)  # raises if the documents do not fit the sequence
    if not 0 <= rank < ranks:
        raise PlanError(f"rank {rank} is not one of {ranks} ranks", fix="give its number in the context-parallel group")
    check_name("kv_transfer", kv_transfer, CODECS)
    if check_strategy(strategy) == "all_to_all":
        all_to_all_ranks = ranks
        if kv_transfer != "exact":
            raise PlanError(
                f"strategy 'all_to_all' carries q, k and v, which kv_transfer = {kv_transfer!r} does not cover",
                fix="use ring, all_gather or hybrid, or kv_transfer = 'exact'",
            )
    uses_all_to_all = strategy != "auto" and STRATEGIES[strategy].uses_all_to_all
    if all_to_all_ranks < 1 or ranks % all_to_all_ranks or (all_to_all_ranks > 1 and not uses_all_to_all):
        raise PlanError(
            f"all_to_all_ranks = {all_to_all_ranks} does not fit strategy {strategy!r} on {ranks} ranks",
            fix="use hybrid with a divisor of the ranks",
        )
    if like and (like.sequence_length, like.ranks) != (seq_len, ranks):
        raise PlanError(
            f"`like` is a plan of {like.ranks} ranks and {like.sequence_length} tokens, not of {ranks} and {seq_len}",
            fix="give a plan of the same sequence and group as `like`",
        )
    if ranks == 1 or (uses_all_to_all and all_to_all_ranks == 1):
        strategy = "ring"  # nobody to trade with
    options = (ranks_per_node, all_to_all_ranks, row_pairs)
    rows = like.layout if like else make_layout(layout, seq_len, ranks, mask, *options)
    return Plan(seq_len, mask, rows, rank, strategy, check_kernel(kernel), all_to_all_ranks, kv_transfer, groups)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    scale: float | None = None,
    sinks: Tensor | None = None,
    qkv_format: str = "bshd",
    softcap: float = 0.0,
) -> Tensor:
    """Attention of a rank's queries over the full sequence, differentiable. Collective over the plan's group.

    Source: online softmax merged by log-sum-exp, FlashAttention (Dao et al., 2022, 2023).

    Args:
        q: `[B, S/P, Hq, Dqk]`; q, k and v have one dtype: bf16, fp16, fp32 or fp64, as the kernel takes.
        k: `[B, S/P, Hkv, Dqk]`; Hq is a multiple of Hkv.
        v: `[B, S/P, Hkv, Dv]`.
        plan: this rank's plan; the ranks of a group call with the same sequence length and mask.
        scale: of the scores, a number without a gradient; default Dqk ** -0.5.
        sinks: `[Hq]`, floating point: a logit per head that every query attends to besides its keys, valued zero.
            Its gradient is that of this rank's queries: sum it over the ranks, like any parameter's.
        qkv_format: order of the dims: "bshd"; "sbhd" `[S/P, B, H, D]`; "thd" `[S/P, H, D]`, one packed row.
        softcap: above 0, scores s become softcap tanh(s / softcap); kernels reference, flex and flash4.

    Returns:
        Attention in q's dtype and format, `[B, S/P, Hq, Dv]`; rows of padding are zero.

    Raises:
        PlanError: shapes or dtypes do not fit the plan or each other, the kernel cannot run them, or the scale requires
            grad.
    """
    to_bshd, back = FORMATS[check_name("qkv_format", qkv_format, FORMATS)]
    q, k, v = to_bshd(q), to_bshd(k), to_bshd(v)
    check_shapes(q, k, v, plan, sinks)
    if not softcap >= 0:
        raise PlanError(f"softcap = {softcap} is not at least 0", fix="give a positive number, or 0 for none")
    all_to_all_ranks = ranks_trading_heads(plan, q.shape[2], k.shape[2])
    check_scale(scale)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    elif scale <= 0:  # kernels multiply the scores of hidden pairs, -inf, by the scale
        q, scale = (-q, -scale) if scale < 0 else (0.0 * q, 1.0)
    return back(attention(q, k, v, sinks, plan.handle, scale, softcap, all_to_all_ranks)[0])


@dataclass(eq=False, repr=False)
class ContextParallel:
    """Attention over a sequence that is split across the ranks of a mesh. All ranks of the mesh construct it together.

    Sources: Ring Attention (Liu et al., 2023), DeepSpeed-Ulysses (Jacobs et al., 2023) for all_to_all, USP (Fang and
    Zhao, 2024) for hybrid, and the context parallelism of Llama 3 (2024) for all_gather.

    Args:
        mesh: DeviceMesh of the P ranks that share a sequence: 1-D, or 2-D for hybrid, with the ring as the outer axis
            and the ranks that trade heads as the inner one.
        strategy: by name: ring, all_gather, all_to_all, hybrid, or auto (hybrid on a 2-D mesh,
            otherwise by heads and window; the log says which and why).
        kernel: local kernel by name, or auto (by device, dtype, head dims and mask).
        layout: contiguous, zigzag, balanced, documents, or auto (documents where they are packed, otherwise zigzag).
        kv_transfer: "exact", or "float8": ring, all_gather and hybrid carry K and V in e4m3 between ranks (hybrid
            in its ring), with an fp32 scale per head and row.
        ranks_per_node: consecutive ranks of the mesh that sit in one node; layout `documents` keeps a document within a
            node where it can, and under hybrid within an inner group.
        row_pairs: (query, key) pairs that a rank computes while a row of keys and values travels (within a node, to
            another one); layout `documents` uses them to weigh messages against uneven work.
        whole_mesh: for hybrid, the same ranks as a 1-D mesh, which `gated_delta_rule`, `selective_scan` and
            `causal_conv` need.

    Attributes:
        strategy: as given, but hybrid on a 2-D mesh.
        make_plan: `plan` as a function that can be pickled, so that a loader's worker can make plans without a mesh.

    Raises:
        LayoutError: the layout is unknown.
        PlanError: another name is unknown, the axes of the mesh do not fit the strategy, or this rank is not in it.
    """

    mesh: DeviceMesh
    strategy: str = "auto"
    kernel: str = "auto"
    layout: str = "auto"
    kv_transfer: str = "exact"
    ranks_per_node: int = NODE_RANKS
    row_pairs: RowPairs = ROW_PAIRS
    whole_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        mesh, all_to_all_ranks = self.mesh, 1
        check_strategy(self.strategy)
        if mesh.ndim == 2 and self.strategy in ("auto", "hybrid"):
            self.strategy, all_to_all_ranks = "hybrid", mesh.size(1)
        elif mesh.ndim != 1 or self.strategy == "hybrid":
            raise PlanError(
                f"the mesh has {mesh.ndim} axes and the strategy is {self.strategy!r}",
                fix="give a 1-D mesh of the context-parallel ranks, or for hybrid a 2-D one: ring x all-to-all",
            )
        whole = self.whole_mesh or mesh
        # A process group numbers its ranks in ascending order, whatever the order of the mesh.
        ascend = all((each.mesh.diff(dim=axis) > 0).all() for each in (mesh, whole) for axis in range(each.ndim))
        if not ascend or whole.mesh.flatten().tolist() != mesh.mesh.flatten().tolist():
            raise PlanError(
                f"ranks do not ascend along an axis of the mesh, or whole_mesh has others: {mesh}, {self.whole_mesh}",
                fix="give meshes of the same ranks, in ascending order",
            )
        if mesh.get_coordinate() is None:
            raise PlanError(f"this rank is not in the mesh: {mesh}", fix="make it on the ranks of the mesh only")
        process_groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        if self.whole_mesh:
            process_groups.insert(1, self.whole_mesh.get_group())  # the ring stays first, the inner group last
        groups = tuple(group.group_name for group in process_groups)
        open_groups(groups, mesh.device_type)
        self.make_plan: Callable[..., Plan] = partial(
            make_plan,
            ranks=mesh.size(),
            rank=mesh.mesh.flatten().tolist().index(mesh.get_rank()),
            strategy=self.strategy,
            kernel=check_kernel(self.kernel),
            layout=check_layout(self.layout),
            all_to_all_ranks=all_to_all_ranks,
            kv_transfer=check_name("kv_transfer", self.kv_transfer, CODECS),
            ranks_per_node=self.ranks_per_node,
            row_pairs=self.row_pairs,
            groups=groups,
        )

    def plan(self, seq_len: int, mask: AttentionMask | None = None, like: Plan | None = None) -> Plan:
        """This rank's plan for sequences of `seq_len` tokens; see `make_plan`, also for the errors.

        Args:
            seq_len: S, in tokens, of the whole sequence.
            mask: default causal, one document.
            like: another layer's plan, whose layout this one takes. Layers of one model may differ in mask
                (a window here, none there) and, by a ContextParallel each, in strategy; they must agree on
                which rank holds which token.
        """
        return self.make_plan(seq_len, mask=mask, like=like)

    attention = staticmethod(attend)


def sum_ranks(x: Tensor, plan: Plan) -> Tensor:
    """Sum a small tensor, which has the same shape on every rank, over the ranks that share the plan's sequences.

    Collective over the plan's group; without gradient.

    Returns:
        A tensor of x's shape, the same on every rank, in x's dtype (int64 for bool and smaller integers).

    Raises:
        PlanError: the plan has several ranks and was made without groups.
    """
    return gather(x.detach(), plan.process_groups).sum(0)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> None:
    """Raise PlanError unless the arguments of `attend` fit the plan and each other."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise PlanError(f"attention takes [batch, sequence, heads, dim], got {shapes}")
    if not q.shape[1] == k.shape[1] == v.shape[1] == plan.local_tokens:
        raise PlanError(f"the plan holds {plan.local_tokens} tokens a rank, got {shapes}", fix="shard with plan.shard")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise PlanError(
            f"batch, heads or dims do not match: {shapes}",
            fix="give q [B, S/P, Hq, Dqk], k [B, S/P, Hkv, Dqk], v [B, S/P, Hkv, Dv], with Hq a multiple of Hkv",
        )
    if not q.dtype == k.dtype == v.dtype:
        raise PlanError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}", fix="cast them to one")
    if sinks is not None and sinks.shape != (q.shape[2],):
        raise PlanError(
            f"sinks have the shape {tuple(sinks.shape)}", fix=f"give one number per query head: {q.shape[2]}"
        )
