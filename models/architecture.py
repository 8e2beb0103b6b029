"""The contract between trainer and models: what each may expect of the other, and an architecture by name.

mypy checks every architecture against it. Trainer and rooms know it by `torchtitan_cp/config/contract.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

Head = Callable[[Tensor, nn.Linear], Any]  # (hidden `[B, S/cp, E]`, output layer) -> what forward returns


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

    def causal_conv(self, x: Tensor, weight: Tensor, plans: Any, /, *, activation: str) -> Tensor:
        """A causal depthwise convolution within documents; x `[B, S/cp, C]`, weight `[C, W]`; activation "silu"."""
        ...

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plans: Any, /, *, qk_l2norm: bool
    ) -> Tensor:
        """The recurrence; q and k `[B, S/cp, Hk, K]`, v `[B, S/cp, Hv, V]`, g and beta `[B, S/cp, Hv]`."""
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


class ModelArgs(Protocol):
    """Sizes of a model, a frozen dataclass; its fields are the keys of `[model] overrides`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

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
    def ffn_dim(self) -> int:
        """Width of the gated MLP, or of one expert."""
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
    def layer_windows(self) -> tuple[int, ...]:
        """Keys that a query of each layer sees, itself included; 0: all."""
        ...

    @property
    def n_experts(self) -> int:
        """Experts of a layer; 0: none."""
        ...

    @property
    def attention_kinds(self) -> tuple[tuple[int, int, bool], ...]:
        """(Dqk, Dv, whether scores have a soft cap) of each kind of attention, once each."""
        ...

    @property
    def attention_widths(self) -> tuple[int, ...]:
        """For each layer, Hq times the sum of the dims of a key and a value; 0 where it has a recurrent state."""
        ...

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Numbers in the recurrent state of each layer; 0 where it attends to keys."""
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
    def compile_checkpoint_conflict(self) -> str:
        """Why layers cannot be both compiled and recomputed; "": they can."""
        ...

    def linear_parameters(self) -> int:
        """Weights that multiply a token, in layers and output layer; of experts only those that it is sent to."""
        ...

    def problem(self) -> str | None:
        """One sentence that says why these sizes are not a valid model, or None."""
        ...

    def rope_problem(self, kind: str) -> str | None:
        """Why a stage cannot have a `rope` of this kind, or None."""
        ...


class PlannedArgs(ModelArgs, Protocol):
    """What the planner asks besides."""

    @property
    def state_widths(self) -> tuple[int, int]:
        """Channels of q, k and v together, and of v alone, in layers with a recurrent state; 0 without any."""
        ...

    @property
    def fused_norms(self) -> bool:
        """A GPU runs each norm as one kernel."""
        ...

    @property
    def active_ffn_dim(self) -> int:
        """Width of the MLP for one token."""
        ...

    @property
    def experts_per_token(self) -> int: ...

    def heads_of(self, window: int) -> tuple[int, int, int]:
        """Hq, Hkv and D of the layers with this window."""
        ...

    def matrix_parameters(self) -> int:
        """All weights of the matrices of `linear_parameters`, including experts that a token does not use."""
        ...

    def small_parameters(self, tp: int) -> int:
        """Parameters of a layer outside its matrices, on one of `tp` ranks; the mean if layers differ."""
        ...

    def embedding_parameters(self, tp: int) -> int:
        """Parameters of the input embedding, on one of `tp` ranks; all else that no layer has, but the last norm."""
        ...


class LanguageModel(nn.Module):
    """What the trainer calls of a model. A class and no Protocol, since a Protocol cannot be an nn.Module.

    Attributes:
        layers: by number; each has `mlp`, a function of each token alone.
        is_first, is_last: whether it has the first and the last layer.
    """

    layers: nn.ModuleDict
    tok_embeddings: nn.Module
    output: nn.Linear
    is_first: bool
    is_last: bool

    def forward(self, tokens: Tensor, positions: Tensor, plans: object, head: Head | None = None) -> Any:
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
    def router_biases(self) -> dict[int, Tensor]:
        """By number of the layer, fp32 buffers `[X]`: added to the experts' scores, for the choice alone."""
        return {}


@dataclass(frozen=True)
class Hub:
    """How the checkpoints of an architecture look in Hugging Face's format.

    Attributes:
        names: our parameter -> theirs; `*` stands for the layer's number in both.
        sizes: config.json -> values of the args; ValueError says why it is not of this architecture.
        config: args -> config.json, without rotary embedding, length and tokens; ValueError says what the format
            cannot express.
        load: replaces `names` for models that a library builds: (part, hub name -> slice of a file, read) fills the
            part. `read` is `checkpoint.hub.read_shard`, which reads this rank's share of a slice. ValueError says what
            the files lack. With `load`, `config` also takes the trained length and `rope_parameters` (None: the model's
            own), and returns everything but the tokens.
        writer: with `load`: args -> (name, tensor, dtype) -> the hub's tensors; the tensor may be on the meta device.
    """

    names: Mapping[str, str]
    sizes: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[..., dict[str, Any]]
    load: Callable[[nn.Module, Mapping[str, Any], Callable[..., bool]], None] | None = None
    writer: Callable[[Any], Callable[[str, Tensor, torch.dtype], dict[str, Tensor]]] | None = None


A = TypeVar("A", bound=PlannedArgs)


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
    args_of: Callable[[Mapping[str, Any], Mapping[str, Any]], A] | None = None
    args_type: Callable[[], type[A]] | None = None
    needs: str = ""
