"""A causal language model of transformers with the interface of our own models (see models/architecture.py)."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, masking_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.architecture import Attend, Head, LanguageModel
from models.huggingface.args import HuggingFaceArgs, parse_config
from models.huggingface.attention import NAME as ATTENTION
from models.huggingface.attention import registered
from models.huggingface.init import Initializer
from models.huggingface.linear import LinearFunctions, native_functions, redirect
from models.moe.model import balance_loss

FULL = "full_attention"  # the layer type whose frequencies a stage changes
BIASES = ("e_score_correction_bias", "expert_bias")  # names of buffers


class HuggingFaceModel(LanguageModel):
    """Parameters and modules have the names that transformers gives them.

    Where config.json has `output_router_logits`, `router_aux_loss_coef` times the balance loss of transformers joins
    the loss, for each sequence by itself: X times the sum over experts of the share of choices and the mean
    probability, both over all tokens and layers. As in models/moe, shares are counted over all ranks that hold the
    sequence, and the sum over its tokens is divided by all tokens of the step. Source: Switch Transformer (Fedus et
    al., 2021).

    Args:
        args: of the model.
        attend: (q `[B, S/cp, Hq, Dqk]`, k, v, plans, window, scale, softcap, and with sinks `sinks=`)
            -> `[B, S/cp, Hq, Dv]`.

    Attributes:
        causal: the model of transformers, whose modules are this one's.
        layers: decoder layers by number.
        shared: what a forward passes to and from modules that its arguments do not reach: `plans`, which stay for the
            recomputation in backward, `head` and its `result`, and `router_logits`, `[B S/cp, X]` of each layer with
            experts.
    """

    causal: Any
    layers: nn.ModuleDict
    tok_embeddings: nn.Module
    output: nn.Linear

    def __init__(self, args: HuggingFaceArgs, attend: Attend) -> None:
        super().__init__()
        self.args, self.shared = args, SimpleNamespace(plans=None, head=None, result=None, router_logits=None)
        config = parse_config(args.sizes)
        config.output_router_logits = False
        causal = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
        share_tied_modules(causal)
        for name, child in causal.named_children():
            self.add_module(name, child)
        layers = {str(number): self.get_submodule(layer.name) for number, layer in enumerate(args.probe.layers)}
        output, embeddings = causal.get_output_embeddings(), causal.get_input_embeddings()
        # vars() bypasses nn.Module, so that nothing is registered twice.
        vars(self).update(causal=causal, layers=nn.ModuleDict(layers), tok_embeddings=embeddings, output=output)
        self._initializer = Initializer(causal.config)
        if output.weight.is_meta:  # even then buffers are real
            self._initializer.restore_buffers(self, torch.device("cpu"))
        self._linear_functions = LinearFunctions(attend, self.shared)
        redirect(causal, self._linear_functions)
        for layer in (layer for layer in args.probe.layers if layer.attention):
            module: Any = self.get_submodule(layer.attention)
            module.attend, module.shared = attend, self.shared
            scales = {other.scale for other in args.probe.layers if other.qk_dim == layer.qk_dim}
            if len(scales) > 1 and isinstance(getattr(module, "scaling", None), float):
                # GPT-2 may scale by the layer's number. A number is a constant of compiled code, which would serve this
                # layer alone; a tensor is an input.
                module.scaling = torch.tensor(module.scaling, dtype=torch.float64, device="cpu")
        output.forward = self._run_head(output)
        for rotary, _ in self._rotaries():
            rotary.forward = in_double(rotary.forward)
            # Before it is set to "default". The config of Hunyuan names another type.
            rotary.original_types = copy.copy(rotary.rope_type)
        self.is_first = self.is_last = True
        self.sum_ranks, self.add_loss = attend.sum_ranks, attend.add_loss
        for name in args.probe.routers if args.balance else ():
            self.get_submodule(name).register_forward_hook(self._keep_router_logits)

    @property
    def experts(self) -> dict[int, nn.Module]:
        """Experts by the number of their layer."""
        layers = enumerate(self.args.probe.layers)
        return {number: self.get_submodule(layer.experts) for number, layer in layers if layer.experts}

    @property
    def expert_gates(self) -> dict[int, tuple[nn.Module, str]]:
        """See LanguageModel; of experts with transformers' grouped products."""
        gates: dict[int, tuple[nn.Module, str]] = {}
        for number, experts in self.experts.items():
            module: Any = experts
            if getattr(module, "has_gate", False):
                gates[number] = module, "_apply_gate"
            elif hasattr(module, "has_gate"):
                gates[number] = module.act_fn, "forward"
        return gates

    @property
    def router_biases(self) -> dict[int, Tensor]:
        """By number of the layer, `[X]`: buffers that are added to the experts' scores for the choice alone.

        Families that have them as parameters without gradient (AFMoE, ERNIE 4.5 MoE, Laguna) are left out.
        """
        return {
            int(number): buffer
            for number, layer in self.layers.items()
            for name, buffer in layer.named_buffers()
            if name.endswith(BIASES)
        }

    def keep_layers(self, first: int, stop: int) -> None:
        """See Llama; there is no pipeline here, so all layers are kept."""
        assert (first, stop) == (0, len(self.layers))

    def forward(self, tokens: Tensor, positions: Tensor, plans: object, head: Head | None = None) -> object:
        """See Llama."""
        balances = bool(self.args.balance and head and self.training)

        def balanced_head(hidden: Tensor, output: nn.Linear) -> object:
            assert head
            loss_sum = self.args.balance * self._balance_loss(len(tokens), plans)
            return head(self.add_loss(hidden, loss_sum), output)

        self.shared.plans, self.shared.head = plans, balanced_head if balances else head
        self.shared.router_logits = [] if balances else None
        positions = positions.expand(tokens.shape)
        logits = self.causal(input_ids=tokens, position_ids=positions, use_cache=False, plans=plans).logits
        result, self.shared.result = self.shared.result, None
        self.shared.router_logits = None  # not to be added to when backward recomputes the layers
        return result if head else logits

    def _keep_router_logits(self, router: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if self.shared.router_logits is not None:
            self.shared.router_logits.append(output[0] if isinstance(output, tuple) else output)

    def _balance_loss(self, rows: int, plans: object) -> Tensor:
        """The balance loss times the number of tokens on this rank, fp32."""
        logits, count = self.shared.router_logits, self.args.experts_per_token
        probabilities = [x.float().softmax(-1).view(rows, -1, x.shape[-1]) for x in logits]
        chosen = (x.topk(count, -1).indices.flatten(1) for x in probabilities)
        return balance_loss(probabilities, chosen, self.sum_ranks, plans) * count / len(logits)

    def _run_head(self, output: Any) -> Callable[[Tensor], Tensor]:
        """A forward for the output layer: if the model was called with a head, it runs the head on the hidden states.

        A head that calls the output layer gets logits with the model's scale and soft cap.
        """
        project, args, shared = output.forward, self.args, self.shared

        def finish(hidden: Tensor) -> Tensor:
            logits = project(hidden) * args.logit_scale
            cap = args.logit_softcap
            return cap * torch.tanh(logits / cap) if cap else logits

        def run(hidden: Tensor) -> Tensor:
            if shared.head is None:
                return project(hidden)
            output.forward = finish
            try:
                shared.result = shared.head(hidden, output)
            finally:
                output.forward = run
            return hidden[..., :1]  # in place of logits, which the model would scale for nobody

        return run

    def set_rope(self, inverse_frequencies: Sequence[float], attention_factor: float, device: torch.device) -> None:
        """Use these frequencies in the layers of full attention; the others keep theirs. See Llama."""
        frequencies = torch.tensor(inverse_frequencies, dtype=torch.float64, device=device)
        for rotary, layer_type in self._rotaries():
            if layer_type in (None, FULL):
                _set_frequencies(rotary, layer_type, frequencies, attention_factor)

    def reset_rope(self, seq_len: int, device: torch.device) -> None:
        """Use the frequencies of config.json, for sequences of `seq_len` tokens."""
        for rotary, layer_type in self._rotaries():
            config = rotary.config
            if layer_type and config.is_heterogeneous:  # Gemma 4: head_dim depends on the type
                config = config.per_layer_config[layer_type]
            rope_type = rotary.original_types[layer_type] if layer_type else rotary.original_types
            compute = getattr(rotary, f"compute_{rope_type}_rope_parameters", None) or ROPE_INIT_FUNCTIONS[rope_type]
            options = {"layer_type": layer_type} if layer_type else {}
            frequencies, factor = compute(config, device=device, seq_len=seq_len, **options)
            _set_frequencies(rotary, layer_type, frequencies.to(device, torch.float64), factor)

    def _rotaries(self) -> Iterator[tuple[Any, str | None]]:
        """Each rotary embedding with each layer type that it has frequencies for; None: it has one set for all."""
        for module in self.modules():
            rope_type = getattr(module, "rope_type", None)
            if isinstance(rope_type, dict):
                yield from ((module, layer_type) for layer_type in rope_type)
            elif rope_type is not None:
                yield module, None

    @contextmanager
    def native_attention(self, documents: Tensor) -> Iterator[None]:
        """Run transformers' own attention, masks, convolutions and recurrences, within documents.

        Not all families infer from the positions that documents are packed.

        Args:
            documents: the number of each token's document, `[B, S]`.
        """
        masks, same_document = masking_utils, masking_utils.packed_sequence_mask_function(documents)

        def mask(*, mask_function: Any = masks.causal_mask_function, **options: Any) -> Any:
            return masks.eager_mask(mask_function=masks.and_masks(mask_function, same_document), **options)

        self.causal.set_attn_implementation("eager")
        redirect(self.causal, native_functions(documents))
        try:
            with registered(masks.AttentionMaskInterface, "eager", mask):
                yield
        finally:
            self.causal.set_attn_implementation(ATTENTION)
            redirect(self.causal, self._linear_functions)

    def init_parameter(self, name: str, seed: int, device: torch.device) -> Tensor:
        """The first values of a whole parameter, fp32; they depend only on its name and its seed."""
        return self._initializer.parameter(name, seed, device)

    def to_empty(self, *, device: Any, recurse: bool = True) -> "HuggingFaceModel":
        """Like that of any module; tied weights stay one parameter, and buffers get their values."""
        super().to_empty(device=device, recurse=recurse)
        self.causal.tie_weights()
        self._initializer.restore_buffers(self, device)
        return self


def share_tied_modules(causal: nn.Module) -> None:
    """Make modules of one class whose parameters are all tied the same object (the blocks that Zamba2 repeats).

    FSDP gathers a parameter for one module.
    """
    first: dict[tuple[object, ...], nn.Module] = {}
    for name, module in list(causal.named_modules()):
        if parameters := tuple(module.parameters()):
            same = first.setdefault((type(module), *map(id, parameters)), module)
            owner, _, child = name.rpartition(".")
            if same is not module:
                setattr(causal.get_submodule(owner), child, same)


def _set_frequencies(rotary: Any, layer_type: str | None, frequencies: Tensor, factor: float) -> None:
    prefix = f"{layer_type}_" if layer_type else ""
    setattr(rotary, f"{prefix}inv_freq", frequencies)
    setattr(rotary, f"{prefix}attention_scaling", factor)
    # Other types choose frequencies by the largest position, which differs from rank to rank.
    if layer_type:
        rotary.rope_type[layer_type] = "default"
    else:
        rotary.rope_type = "default"


class DoubleCasts(TorchFunctionMode):
    """Casts to fp32 become casts to fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def in_double(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A rotary embedding's forward with angles in fp64: at 1M positions those in fp32 are off by 0.06 radians."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with DoubleCasts():
            waves = forward(x, *args, **kwargs)
        # Some families return the waves in fp32, and round only what they rotate.
        single = {torch.complex128: torch.complex64, torch.float64: torch.promote_types(x.dtype, torch.float32)}
        return tree_map(lambda wave: wave.to(single.get(wave.dtype, wave.dtype)), waves)

    return run
