"""The contract between trainer and models: what each may expect of the other, and an architecture by name.

mypy checks every architecture against it. Trainer and rooms know it by `torchtitan_cp/config/contract.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

Head = Callable[[Tensor, nn.Linear], object]  # (hidden `[B, S/cp, E]`, output layer) -> what forward returns

HubConfig = dict[str, Any]
"""A config.json as it was read: a JSON table, of whose values nothing is known but what its reader checks."""


class Attend(Protocol):
    """What mixes tokens, which the trainer hands to a model.

    `plans` is what the model's forward was given; the model passes it through unread.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plans: Any,
        window: int,
        /,
        *,
        sinks: Tensor = ...,
        scale: float | None = ...,
        softcap: float = ...,
    ) -> Tensor:
        """Attention of a layer.

        Args:
            q, k, v: `[B, S/cp, Hq, Dqk]`, `[B, S/cp, Hkv, Dqk]`, `[B, S/cp, Hkv, Dv]`.
            window: keys that a query sees, itself included; 0: all.
            sinks: `[Hq]`, a logit of each head that takes part in the softmax and adds no value.
            scale: of the scores; None: Dqk ** -0.5.
            softcap: scores become softcap tanh(score / softcap); 0: not.

        Returns:
            `[B, S/cp, Hq, Dv]`.
        """
        ...

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        plans: Any,
        /,
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """A causal depthwise convolution within documents.

        Args:
            x: `[B, S/cp, C]`; weight: `[C, W]`; bias: `[C]`.
            activation: "silu", or None.
        """
        ...

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plans: Any, /, *, qk_l2norm: bool
    ) -> Tensor:
        """The gated delta rule within documents.

        Args:
            q, k: `[B, S/cp, Hk, K]`; v: `[B, S/cp, Hv, V]`; beta: `[B, S/cp, Hv]`.
            g: log gates `[B, S/cp, Hv]`, or `[B, S/cp, Hv, K]` (Kimi's rule).
            qk_l2norm: divide each head's q and k by their L2 norms first.
        """
        ...

    def selective_scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, plans: Any, /) -> Tensor:
        """The scan of Mamba-2 within documents, without the skip D x.

        Args:
            x: `[B, S/cp, H, D]`; dt: step sizes `[B, S/cp, H]`; A: `[H]`; B, C: `[B, S/cp, G, N]`.
        """
        ...

    def sum_ranks(self, x: Tensor, plans: Any, /) -> Tensor:
        """Sum a tensor without gradient over the ranks that share each sequence."""
        ...

    def add_loss(self, hidden: Tensor, loss_sum: Tensor) -> Tensor:
        """Return `hidden`, and add a loss of the model's own to the step's; only in training.

        Args:
            loss_sum: scalar, a sum over this rank's tokens. The trainer divides it by the tokens of the step.
        """
        ...


@dataclass(frozen=True)
class Mixer:
    """What mixes the tokens of one layer, in the sizes that its forward hands to `attend`.

    The model states them, since its parameters show products of these sizes alone, and no window.

    Attributes:
        n_heads, n_kv_heads: Hq, Hkv; 0 in a layer that attends to no keys.
        qk_dim, v_dim: Dqk, Dv.
        window: keys that a query sees, itself included; 0: all.
        softcap: whether scores have a soft cap.
        state_size: numbers in the recurrent state; 0 without one.
        state_channels, state_values: of a recurrence, channels of q, k and v together, and of v alone; of a convolution
            without one, its channels, and 0.
        state_heads: Hv of a recurrence; state_gates: gates of a head for a token, 1, or K in Kimi's rule.
        state_products: products of a token with each number of the state: a delta rule reads it by the key, writes it,
            and reads it by the query; a scan does not read it by the key.
    """

    n_heads: int
    n_kv_heads: int
    qk_dim: int
    v_dim: int
    window: int = 0
    softcap: bool = False
    state_size: int = 0
    state_channels: int = 0
    state_values: int = 0
    state_heads: int = 0
    state_gates: int = 1
    state_products: int = 3

    @property
    def width(self) -> int:
        """Hq (Dqk + Dv): FLOPs of a query and a key are twice that."""
        return self.n_heads * (self.qk_dim + self.v_dim)

    @property
    def head_dim(self) -> int:
        """The mean of Dqk and Dv, which determines work and messages."""
        return (self.qk_dim + self.v_dim) // 2


class ModelArgs(Protocol):
    """Sizes of a model, a frozen dataclass; its fields are the keys of `[model] overrides`.

    What the modules of a model show is not in it: the planner counts that (`torchtitan_cp/planner/parameters.py`).
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __hash__(self) -> int: ...

    @property
    def dim(self) -> int:
        """E, width of the residual stream."""
        ...

    @property
    def n_layers(self) -> int: ...

    @property
    def n_heads(self) -> int:
        """Hq; where layers differ, of the one with the widest attention."""
        ...

    @property
    def n_kv_heads(self) -> int:
        """Hkv, of that layer."""
        ...

    @property
    def head_dim(self) -> int:
        """D, of that layer."""
        ...

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Attention or recurrence of each layer."""
        ...

    @property
    def last_products(self) -> tuple[str, ...]:
        """Of each layer, the name of the linear layer that runs last, if nothing that has weights follows it; else "".

        The backward needs no result of that product, so a recomputed layer does not run it again. Behind it there may
        be a norm, as in Gemma, or the router's shares of experts. Modules do not show in which order they run.
        """
        ...

    @property
    def ffn_dim(self) -> int:
        """Width of the gated MLP, or of one expert."""
        ...

    @property
    def active_ffn_dim(self) -> int:
        """Width of the MLP for one token. Modules do not show which of their matrices are the MLP's."""
        ...

    @property
    def n_experts(self) -> int:
        """Experts of a layer; 0: none."""
        ...

    @property
    def experts_per_token(self) -> int:
        """Experts that a token is sent to, which only the forward knows; 0: none."""
        ...

    @property
    def vocab_size(self) -> int:
        """V; 0 takes the tokenizer's."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """The output matrix is the embedding."""
        ...

    @property
    def rotary_dim(self) -> int:
        """Entries of a head that RoPE rotates."""
        ...

    @property
    def longest(self) -> int:
        """Tokens that a sequence may have, as a table of learned positions allows; 0: any number."""
        ...

    @property
    def logit_scale(self) -> float:
        """A factor of the logits; 1: none."""
        ...

    @property
    def logit_softcap(self) -> float:
        """The loss turns logits into softcap tanh(logit / softcap); 0: not."""
        ...

    @property
    def compile_conflict(self) -> str:
        """Why layers cannot be compiled; "": they can."""
        ...

    def compile_checkpoint_conflict(self, ep: int) -> str:
        """Why layers cannot be both compiled and recomputed; "": they can.

        Args:
            ep: ranks that share the experts. Above 1 layers with experts are not compiled whole.
        """
        ...

    def linear_parameters(self) -> int:
        """Weights that multiply a token, in layers and output layer; of experts only those that it is sent to.

        A check splits layers between pipeline ranks by them, and builds no model for it.
        """
        ...

    def problem(self) -> str | None:
        """One sentence that says why these sizes are not a valid model, or None."""
        ...

    def rope_problem(self, kind: str) -> str | None:
        """Why a stage cannot have a `rope` of this kind, or None."""
        ...


class LanguageModel(nn.Module):
    """What the trainer calls of a model. A class and no Protocol, since a Protocol cannot be an nn.Module.

    Attributes:
        layers: by number; each has `mlp`, a function of each token alone. Where torch.compile takes only the first half
            of a layer, it has `attention_half` (the layer's inputs -> hidden states) and `experts_half` (hidden states,
            plans), which its forward calls one after the other.
        is_first, is_last: whether it has the first and the last layer.
    """

    layers: nn.ModuleDict
    tok_embeddings: nn.Module
    output: nn.Linear
    is_first: bool
    is_last: bool

    def forward(self, tokens: Tensor, positions: Tensor, plans: object, head: Head | None = None) -> object:
        """Run the network.

        Args:
            tokens: `[B, S/cp]` int64; where the first layers are not kept, hidden states `[B, S/cp, E]`.
            positions: `[S/cp]` or `[B, S/cp]` int64, position of each token for RoPE.
            plans: passed to attention.
            head: lets a loss make its logits in chunks.

        Returns:
            logits `[B, S/cp, V]`, or what `head` returns; where the last layers are not kept, hidden states.
        """
        raise NotImplementedError

    def keep_layers(self, first: int, stop: int) -> None:
        """Keep layers [first, stop), with the embedding before the first of all and the output after the last.

        An output tied to the embedding keeps the embedding's weight, under the embedding's name.
        """
        raise NotImplementedError

    def set_rope(self, inverse_frequencies: Sequence[float], attention_factor: float, device: torch.device) -> None:
        """Use these rotary frequencies from the next forward on.

        Args:
            inverse_frequencies: rotary_dim/2 angles a position, in radians.
            attention_factor: multiplies cos and sin (1 except with scalings that say otherwise).
            device: where the model computes.
        """
        raise NotImplementedError

    def init_std(self, parameter: str) -> float | None:
        """Standard deviation of a parameter's first values, by name; 0 starts it at zero, None at one."""
        raise NotImplementedError

    @property
    def experts(self) -> dict[int, nn.Module]:
        """By number of the layer: called with (hidden `[T, E]`, chosen `[T, K]`, shares `[T, K]`).

        Their parameters have the experts in dim 0.
        """
        return {}

    @property
    def expert_gates(self) -> dict[int, tuple[nn.Module, str]]:
        """By number of the layer, a module and the name of its function between the products of the layer's experts.

        The function is of each row alone, and is called as the module's attribute: tensors `[rows, ..]` -> `[rows, F]`.
        """
        return {}

    @property
    def router_biases(self) -> dict[int, Tensor]:
        """By number of the layer, fp32 buffers `[X]`: added to the experts' scores, for the choice alone."""
        return {}


class StoredTensor(Protocol):
    """A tensor in a safetensors file, as `safe_open(...).get_slice` gives it: indexing reads that part."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: slice | tuple[slice, ...], /) -> Tensor: ...


class ReadShard(Protocol):
    """Reads this rank's share of a stored tensor into ours; see `checkpoint.hub.read_shard`."""

    def __call__(self, stored: StoredTensor, start: Sequence[int], whole: Tensor, *, compare: bool = False) -> bool: ...


@dataclass(frozen=True)
class Hub:
    """How the checkpoints of an architecture look in Hugging Face's format.

    Attributes:
        names: our parameter -> theirs; `*` stands for the layer's number in both.
        sizes: config.json -> values of the args; ValueError says why it is not of this architecture.
        config: args -> config.json, without rotary embedding, length and tokens; ValueError says what the format
            cannot express.
        load: replaces `names` for models that a library builds: (part, hub name -> tensor of a file, read) fills the
            part. ValueError says what the files lack. With `load`, `config` also takes the trained length and
            `rope_parameters` (None: the model's own), and returns everything but the tokens.
        writer: with `load`: args -> (name, tensor, dtype) -> the hub's tensors; the tensor may be on the meta device.
        kept: (args, hub names of a checkpoint) -> those that no parameter has, and that an export of a model trained
            from it has unchanged.
    """

    names: Mapping[str, str]
    sizes: Callable[[HubConfig], dict[str, object]]
    config: Callable[..., dict[str, object]]
    load: Callable[[nn.Module, Mapping[str, StoredTensor], ReadShard], None] | None = None
    writer: Callable[[ModelArgs], Callable[[str, Tensor, torch.dtype], dict[str, Tensor]]] | None = None
    kept: Callable[[ModelArgs, Iterable[str]], set[str]] = lambda args, hub_names: set()


A = TypeVar("A", bound=ModelArgs)


@dataclass(frozen=True)
class Architecture(Generic[A]):
    """An architecture by name.

    Attributes:
        flavors: sizes by name.
        build: (args, attend) -> the model.
        sharding: pattern of module names -> role in tensor parallelism (`torchtitan_cp/parallel/tensor.py`).
        hub: names and sizes in Hugging Face's format; None if it has none.
        lacks: dotted key of the config -> why this architecture cannot have it on (a flag), or above 1 (a number).
        args_of: (config.json, overrides) -> args, for an architecture without flavors, whose config.json has all sizes;
            ValueError says why it is refused. A stage without `rope` then keeps the rotary embeddings of config.json.
        args_type: () -> the class of these args.
        needs: package that this architecture needs; "" if none.
    """

    name: str
    flavors: Mapping[str, A]
    build: Callable[[A, Attend], LanguageModel]
    sharding: Mapping[str, str]
    hub: Hub | None = None
    lacks: Mapping[str, str] = field(default_factory=dict)
    args_of: Callable[[HubConfig, HubConfig], A] | None = None
    args_type: Callable[[], type[A]] | None = None
    needs: str = ""
