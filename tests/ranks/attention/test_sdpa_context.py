"""Models that know nothing of context parallelism, trained under it: plain torch and Hugging Face."""

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention  # imported before any block, as models do
from torch.utils.checkpoint import checkpoint

from tests.support.deep import deep_rows
from tests.support.rank_pool import RankPool
from torchtitan_cp.attention import AttentionMask, ContextParallel, PlanError, context_parallel
from torchtitan_cp.attention.sdpa_context import _counts_positions

S, VOCABULARY = 48, 64


@lru_cache
def make_cp(strategy: str = "ring", layout: str = "auto") -> ContextParallel:
    return ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), strategy, layout=layout)


def hugging_face(kind: str, attention: str = "sdpa") -> nn.Module:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": attention,
    }
    if kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    else:
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, head_dim=8))
    return model.double().train()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """ids, the token after each, positions."""
    text = torch.randint(VOCABULARY, (2, S + 1), generator=torch.Generator().manual_seed(3))
    return text[:, :-1].clone(), text[:, 1:].clone(), torch.arange(S).repeat(2, 1)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
    ones = torch.ones_like(ids)
    return model(
        ids, attention_mask=ones, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=2 * S
    ).loss


def train(model: nn.Module, strategy: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and the first step's gradients, over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for step in range(3):
        ids, labels, positions = batch()
        if strategy is None:
            loss = loss_of(model, ids, labels, positions)
            loss.backward()
        else:
            with context_parallel(make_cp(strategy), [ids, labels, positions], [1, 1, 1], model=model):
                loss = loss_of(model, ids, labels, positions)
                loss.backward()
            assert ids.shape == (2, S)
            loss = loss.detach()
            for x in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(x)
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def run_hugging_face(kind: str, strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    return train(hugging_face(kind), strategy)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_hugging_face_model_trains_unmodified(ranks: Callable[[int], RankPool], kind: str, strategy: str) -> None:
    pytest.importorskip("transformers")
    losses, gradients = train(hugging_face(kind), None)
    for split_losses, split_gradients in ranks(2)(run_hugging_face, kind, strategy):
        # The models are fp64, their loss is made in fp32 (logits.float()).
        assert split_losses == pytest.approx(losses, rel=1e-6)
        assert split_gradients.keys() == gradients.keys()
        for name, want in gradients.items():
            assert (split_gradients[name] - want).norm() < 1e-6 * want.norm(), name


def run_compiled_hugging_face(whole: bool) -> tuple[list[float], dict[str, Tensor]] | str:
    model = hugging_face("llama")
    for part in [model] if whole else model.model.layers:  # type: ignore[union-attr]
        part.compile(backend="eager")  # type: ignore[operator]
    try:
        return train(model, "ring")
    except PlanError as error:
        return str(error)


@pytest.mark.deep
def test_layers_of_a_hugging_face_model_may_be_compiled(ranks: Callable[[int], RankPool]) -> None:
    """transformers leaves a mask to SDPA only where torch.compile does not trace the place that makes it."""
    pytest.importorskip("transformers")
    losses, _ = train(hugging_face("llama"), None)
    assert ranks(2)(run_compiled_hugging_face, False)[0][0] == pytest.approx(losses, rel=1e-6)
    assert "; compile layers, not the model" in ranks(2)(run_compiled_hugging_face, True)[0]


def run_never_reached() -> str:
    model = hugging_face("llama", "eager")
    ids, labels, positions = batch()
    with (
        pytest.raises(PlanError) as error,
        context_parallel(make_cp(), [ids, labels, positions], [1, 1, 1], model=model),
    ):
        loss_of(model, ids, labels, positions)
    return str(error.value)


def test_a_model_whose_attention_never_reaches_sdpa_is_named(ranks: Callable[[int], RankPool]) -> None:
    pytest.importorskip("transformers")
    message = ranks(2)(run_never_reached)[0]
    assert "LlamaAttention ran and never called scaled_dot_product_attention (its attn_implementation is 'ea" in message


def run_nothing_called() -> str:
    model, x = nn.Linear(S // 2, 4), torch.zeros(1, S)
    with pytest.raises(PlanError) as error, context_parallel(make_cp(), [x], [1], model=model):
        model(x)
    return str(error.value)


def test_a_block_without_any_attention_names_its_model(ranks: Callable[[int], RankPool]) -> None:
    assert "Linear never called scaled_dot_product_attention" in ranks(2)(run_nothing_called)[0]


def run_gap(gap: str, layout: str) -> str:
    """What would be silently wrong on a shard; the message that says so, or how far off the loss is."""
    hf = pytest.importorskip("transformers")
    model = hugging_face("llama")
    if gap == "window":
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 36}
        model = hf.MistralForCausalLM(hf.MistralConfig(**sizes, **heads)).double()
    if gap == "one layer eager":
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"  # type: ignore[union-attr]
        model.model.layers[1].self_attn.config = config  # type: ignore[union-attr, index]

    def loss_of_all(ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "position_ids": positions}
        options |= {"labels": labels, "shift_labels": labels, "num_items_in_batch": 2 * S}
        for name in {"no positions": ["position_ids"], "no shift": ["shift_labels"]}.get(gap, []):
            del options[name]
        return model(ids, **options).loss

    buffers = batch()
    try:
        with context_parallel(make_cp(layout=layout), list(buffers), [1, 1, 1]):
            loss_of_all(*buffers)
    except PlanError as error:
        return str(error)
    return "silent"


@pytest.mark.parametrize(
    ("gap", "message"),
    [
        ("one layer eager", "LlamaAttention ran and never called scaled_dot_product_attention"),
        (
            "no positions",
            "arange counted 24 tokens before attention: positions within a rank's shard; put position ids",
        ),
        ("no shift", "shifts or cuts a buffer along its sequence, which is wrong at the edges of a shard"),
        ("window", "MistralAttention has sliding_window = 36, and this block's mask has none"),
    ],
)
def test_what_would_be_silently_wrong_on_a_shard_is_refused_by_name(
    ranks: Callable[[int], RankPool], gap: str, message: str
) -> None:
    for answer in ranks(2)(run_gap, gap, "zigzag"):
        assert message in answer


class Mixer(nn.Module):
    """A depthwise causal convolution by a function of its own, as with the package causal_conv1d, then attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(16, 16, 4, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1)
        q = (rows * self.conv1d.weight[:, 0]).sum(-1).unflatten(-1, (2, 8)).transpose(1, 2)
        return scaled_dot_product_attention(q, q, q, is_causal=True)


def qwen3_next() -> nn.Module:
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    experts = {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**sizes, **heads, **linear, **dims, **experts))


def run_token_mixer(kind: str) -> str:
    """A layer that mixes neighbouring tokens other than by attention; the message that refuses it."""
    ids, labels, positions = batch()
    x = torch.randn(1, S, 16)
    calls: dict[str, Callable[[], Any]] = {
        "owner": lambda: Mixer()(x),
        "function": lambda: nn.functional.conv1d(x.mT, weight=torch.ones(16, 16, 4)),
        "qwen3_next": lambda: loss_of(qwen3_next(), ids, labels, positions),
    }
    with pytest.raises(PlanError) as error, context_parallel(make_cp(), [ids, labels, positions, x], [1] * 4):
        calls[kind]()
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "name"), [("qwen3_next", "Qwen3NextGatedDeltaNet"), ("owner", "Mixer"), ("function", "conv1d")]
)
def test_a_layer_that_mixes_tokens_other_than_by_attention_is_refused_by_name(
    ranks: Callable[[int], RankPool], kind: str, name: str
) -> None:
    if kind == "qwen3_next":
        pytest.importorskip("transformers")
    for message in ranks(2)(run_token_mixer, kind):
        assert f"{name} mixes neighbouring tokens, and a rank sees only those of its shard" in message


def run_one_refuses() -> str:
    """Only rank 0 makes a mask, as transformers may where a shard's position ids jump."""
    q, x = torch.zeros(1, 2, S // 2, 8), torch.zeros(1, S)
    own = torch.ones(S // 2, S // 2, dtype=torch.bool) if dist.get_rank() == 0 else None
    with pytest.raises(PlanError) as error, context_parallel(make_cp(layout="zigzag"), [x], [1]):
        scaled_dot_product_attention(q, q, q, own, is_causal=own is None)
    return str(error.value)


def test_what_one_rank_refuses_ends_the_others_too(ranks: Callable[[int], RankPool]) -> None:
    first, last = ranks(2)(run_one_refuses, timeout=60.0)
    assert "attention_mask=torch.ones_like(input_ids)" in first
    assert "another rank refused this call" in last


def run_mistral() -> list[float]:
    """A window given to the block equals the model's own on one process."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 36}
    model = hf.MistralForCausalLM(hf.MistralConfig(**sizes, **heads)).double()
    want = loss_of(model, *batch()).item()
    ids, labels, positions = batch()
    with context_parallel(make_cp(), [ids, labels, positions], [1, 1, 1], mask=AttentionMask(window=(35, -1))):
        loss = loss_of(model, ids, labels, positions).detach()
    dist.all_reduce(loss)
    return [loss.item(), want]


def test_a_window_given_to_the_block_is_the_models_own(ranks: Callable[[int], RankPool]) -> None:
    pytest.importorskip("transformers")
    got, want = ranks(2)(run_mistral)[0]
    assert got == pytest.approx(want, rel=1e-6)


def run_own_mask() -> str:
    """A padding mask that transformers folds into a mask of the shard's own rows."""
    model = hugging_face("llama")
    ids, _, positions = batch()
    padded = torch.ones_like(ids)
    padded[:, [0, -1]] = 0  # a token of each shard
    buffers = [ids, padded, positions]
    with pytest.raises(PlanError) as error, context_parallel(make_cp(layout="contiguous"), buffers, [1, 1, 1]):
        model(ids, attention_mask=padded, position_ids=positions, use_cache=False)
    return str(error.value)


def test_a_mask_that_speaks_of_one_shard_is_refused(ranks: Callable[[int], RankPool]) -> None:
    pytest.importorskip("transformers")
    assert "attention_mask=torch.ones_like(input_ids)" in ranks(2)(run_own_mask)[0]


class Plain(nn.Module):
    """Attention by the function that this module imported before any block."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.project = nn.Linear(16, 48, dtype=torch.float64)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


def run_plain(causal: bool, mask: AttentionMask | None, recompute: bool) -> list[bool]:
    torch.manual_seed(1)
    model, x = Plain(causal), torch.randn(2, S, 16, dtype=torch.float64)
    with context_parallel(make_cp(layout="balanced"), [x], [1], mask=mask) as plan:
        out = checkpoint(model.attend, x, use_reentrant=False) if recompute else model.attend(x)
        out.square().sum().backward()
    gradient = model.project.weight.grad
    assert gradient is not None
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    model.zero_grad()
    full = plan.unshard(out.detach())
    # Two documents are two sequences.
    documents = mask.document_lengths[0] if mask and mask.document_lengths else (S,)
    single = torch.cat([model.attend(part) for part in x.split(documents, 1)], 1)
    single.square().sum().backward()
    want = model.project.weight.grad
    assert want is not None
    return [torch.allclose(full, single), torch.allclose(gradient, want), x.shape[1] == S]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_a_call_is_intercepted_wherever_the_function_was_imported_from(
    ranks: Callable[[int], RankPool], causal: bool, recompute: bool
) -> None:
    assert ranks(2)(run_plain, causal, None, recompute) == [[True] * 3] * 2


def test_packed_documents_come_as_a_mask(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(run_plain, True, AttentionMask(document_lengths=((20, 28),)), False) == [[True] * 3] * 2


def run_outside(reentrant: bool) -> str:
    """Backward after the block, where nothing would catch the recomputation."""
    model, x = Plain(), torch.randn(2, S, 16, dtype=torch.float64)
    try:
        with context_parallel(make_cp(), [x], [1]):
            out = checkpoint(model.attend, x, use_reentrant=reentrant)
        out.sum().backward()
    except (PlanError, RuntimeError) as error:
        return type(error).__name__
    return "nothing raised"


def test_a_recomputation_outside_the_block_is_an_error(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2)(run_outside, True) == ["PlanError"] * 2
    assert all(name != "nothing raised" for name in ranks(2)(run_outside, False))


def run_refusals() -> list[str]:
    q, x = torch.zeros(1, 2, S // 2, 8), torch.zeros(1, S)
    calls: list[Any] = [
        lambda: scaled_dot_product_attention(q, q, q, dropout_p=0.1),
        lambda: scaled_dot_product_attention(q, q[:, :, :3], q[:, :, :3], is_causal=True),
        lambda: scaled_dot_product_attention(q, q, q, is_causal=False),
    ]
    messages = []
    for call in calls:
        try:
            with context_parallel(make_cp(), [x], [1], mask=AttentionMask()):
                call()
        except PlanError as error:
            messages.append(str(error))
        assert x.shape == (1, S), "restored after an error too"
    for buffers, dims in (
        ([], []),
        ([x], [1, 1]),
        ([x, torch.zeros(4)], [1, 0]),
        ([x, x[0]], [1, 1]),
        ([x.clone().requires_grad_()], [1]),
    ):
        with pytest.raises(PlanError) as refused, context_parallel(make_cp(), buffers, dims):
            pass
        messages.append(str(refused.value))
    twice = torch.zeros(1, S)
    with pytest.raises(PlanError), context_parallel(make_cp(), [twice, twice], [1, 1]):
        pass
    assert twice.shape == (1, S), "restored when sharding itself fails"
    kept = torch.zeros(1, S)
    with context_parallel(make_cp(), [kept], [1], {kept}):
        scaled_dot_product_attention(q, q, q, is_causal=True)
    assert kept.shape == (1, S // 2)
    return messages


def test_what_a_shard_cannot_honour_is_refused_by_name(ranks: Callable[[int], RankPool]) -> None:
    messages = ranks(2)(run_refusals)[0]
    assert "attention dropout of 0.1 is not available; set it to 0" in messages[0]
    assert "only self-attention over the sharded sequence" in messages[1]
    assert "the call has is_causal = False and the mask causal = True" in messages[2]
    assert "0 buffers and 0 sequence dims" in messages[3]
    assert "1 buffers and 2 sequence dims" in messages[4]
    assert "buffers [(1, 48), (4,)] have no one length along dims [1, 0]; give each its sequence dim" in messages[5]
    assert "buffers [(1, 48), (48,)] have no one length along dims [1, 1]" in messages[6]
    assert "requires grad" in messages[7]


def run_mapped() -> str:
    x = torch.randn(3, 1, 2, S, 8)
    with pytest.raises(PlanError) as refused, context_parallel(make_cp(), [x], [3]):
        torch.vmap(lambda row: scaled_dot_product_attention(row, row, row, is_causal=True))(x)
    assert x.shape[3] == S
    return str(refused.value)


@pytest.mark.parametrize("size", [1, 2])
def test_a_call_under_vmap_which_would_not_reach_us_is_refused(ranks: Callable[[int], RankPool], size: int) -> None:
    wanted = "was called under torch.vmap, which would attend within a rank's own shard only; make what is mapped"
    assert all(wanted in message for message in ranks(size)(run_mapped))


def run_compiled() -> list[bool]:
    """The same compiled module in blocks of several masks, and outside of them."""
    torch.manual_seed(1)
    model, x = Plain(), torch.randn(2, S, 16, dtype=torch.float64)
    compiled, equal = torch.compile(model.attend, backend="aot_eager"), []
    for lengths in ((S,), (20, 28), (5, 43)):
        want = torch.cat([model.attend(part) for part in x.split(lengths, 1)], 1)
        equal.append(torch.allclose(compiled(x[:, :20]), model.attend(x[:, :20])))
        with context_parallel(make_cp(), [x], [1], mask=AttentionMask(document_lengths=(lengths,))) as plan:
            equal.append(torch.allclose(compiled(x), plan.shard(want)))
    return equal


@pytest.mark.parametrize("size", [1, 2])
def test_a_compiled_model_follows_the_mask_of_each_block(ranks: Callable[[int], RankPool], size: int) -> None:
    assert ranks(size)(run_compiled) == [[True] * 6] * size


# What a shard shows says nothing of the sequence ----------------------------------------------------------------


def run_families(names: list[str], *arguments: Any) -> dict[str, str]:
    sdpa_families = pytest.importorskip("tests.support.sdpa_families")
    return sdpa_families.outcomes(names or list(sdpa_families.ALL), *arguments)


CHUNKED = "Llama4TextAttention has attention_chunk_size = 36, and this block has a document of 48 tokens"
MIXED = "has sliding_window = None, and this block's mask has 36"
MASK = AttentionMask(window=(35, -1))


@pytest.mark.parametrize(
    ("family", "window", "mask", "answer"),
    [
        ("Llama 4", 36, None, CHUNKED),
        ("Llama 4", 47, None, "attention_chunk_size = 47"),
        ("Llama 4", 48, None, "equal"),
        ("Mistral", 36, None, "MistralAttention has sliding_window = 36, and this block's mask has none"),
        ("Mistral", 36, MASK, "equal"),
        ("Mistral", 47, None, "MistralAttention has sliding_window = 47, and this block's mask has none"),
        ("Mistral", 47, AttentionMask(window=(46, -1)), "equal"),
        ("Mistral", 48, None, "equal"),
        ("Ministral", 36, MASK, f"MinistralAttention {MIXED}"),
        ("Exaone 4", 36, MASK, f"Exaone4Attention {MIXED}"),  # its layers of full attention name the window too
        ("Phi-3", 36, AttentionMask(document_lengths=((30, 18),)), "equal"),  # no document is longer
        ("Llama 4", 36, AttentionMask(document_lengths=((36, 12),)), "equal"),
    ],
)
def test_a_window_or_chunk_that_a_shard_does_not_show_is_honoured_or_refused(
    ranks: Callable[[int], RankPool], family: str, window: int, mask: AttentionMask | None, answer: str
) -> None:
    pytest.importorskip("transformers")
    lengths = mask.document_lengths[0] if mask and mask.document_lengths else (S,)
    assert all(answer in found[family] for found in ranks(2)(run_families, [family], window, lengths, mask))


@pytest.mark.deep
@pytest.mark.parametrize(("window", "layout"), [(25, "contiguous"), (36, "zigzag"), (48, "zigzag")])
def test_no_family_is_silently_another_model_whatever_its_window_and_the_layout(
    ranks: Callable[[int], RankPool], window: int, layout: str
) -> None:
    pytest.importorskip("transformers")
    for found in ranks(2)(run_families, [], window, (S,), None, layout):
        assert not {name: answer for name, answer in found.items() if answer.startswith("silent")}
        assert sum(answer == "equal" for answer in found.values()) > 60
        if window >= S:
            masked = [name for name, answer in found.items() if "sliding_window" in answer or "chunk" in answer]
            assert not masked, "a window that restricts nothing is refused"


@pytest.mark.deep
def test_no_family_with_a_window_in_some_layers_takes_it_for_all(ranks: Callable[[int], RankPool]) -> None:
    pytest.importorskip("transformers")
    families = pytest.importorskip("tests.support.huggingface_families").FAMILIES
    mixed = [name for name, config in families.items() if "sliding_attention" in config.get("layer_types", ())]
    for found in ranks(2)(run_families, mixed, 36, (S,), MASK):
        assert len(found) > 15
        # A hybrid is refused for its convolution, which comes before attention.
        refused = (MIXED, "mixes neighbouring tokens")
        assert all(answer == "no sdpa" or any(reason in answer for reason in refused) for answer in found.values()), (
            found
        )


def run_single_token_shards(mask: AttentionMask | None) -> str:
    sdpa_families = pytest.importorskip("tests.support.sdpa_families")
    return sdpa_families.outcome(sdpa_families.ALL["Llama"], 100, (2,), mask, "contiguous")


def test_a_shard_of_one_token_takes_the_causal_order_of_the_mask(ranks: Callable[[int], RankPool]) -> None:
    pytest.importorskip("transformers")
    assert ranks(2)(run_single_token_shards, AttentionMask()) == ["equal"] * 2
    for message in ranks(2)(run_single_token_shards, None):
        assert "a shard of one token does not show whether attention is causal; say so" in message


def run_longrope(longest: int, layout: str) -> str:
    """Phi-3, whose frequencies depend on the largest position of all."""
    sdpa_families = pytest.importorskip("tests.support.sdpa_families")
    config = {**sdpa_families.ALL["Phi-3, longrope"], "original_max_position_embeddings": longest}
    return sdpa_families.outcome(config, layout=layout)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_frequencies_are_chosen_by_the_largest_position_of_the_sequence(
    ranks: Callable[[int], RankPool], layout: str
) -> None:
    pytest.importorskip("transformers")
    for longest in (30, 40):
        assert ranks(2)(run_longrope, longest, layout) == ["equal"] * 2


# Positions and counts ---------------------------------------------------------------------------------------------


def run_documents(families: list[str], *documents: tuple[int, ...]) -> list[dict[str, str]]:
    return [run_families(families, 100, one, AttentionMask(document_lengths=(one,))) for one in documents]


@deep_rows("seed", range(12), default=[0])
def test_documents_of_any_length_with_their_positions_equal_one_process(
    ranks: Callable[[int], RankPool], seed: int
) -> None:
    sdpa_families = pytest.importorskip("tests.support.sdpa_families")
    drawn = [sdpa_families.draw_lengths(8 * seed + number) for number in range(3)]
    for found in ranks(2)(run_documents, ["Llama", "Qwen2-MoE"], (7, 30, 1, 10), (1, 47), *drawn):
        assert found == [{"Llama": "equal", "Qwen2-MoE": "equal"}] * 5, drawn


@pytest.mark.deep
@pytest.mark.parametrize("lengths", [(7, 30, 1, 10), (1, 47), (1, 1, 45, 1)])
def test_every_family_takes_documents_of_one_token_as_it_takes_one_document(
    ranks: Callable[[int], RankPool], lengths: tuple[int, ...]
) -> None:
    pytest.importorskip("transformers")
    whole = ranks(2)(run_families, [])[0]
    names = [name for name, answer in whole.items() if answer == "equal"]
    names.remove("Gemma, as in PaliGemma")  # not causal
    mask = AttentionMask(document_lengths=(lengths,))
    for found in ranks(2)(run_families, names, 100, lengths, mask):
        assert not {name: answer for name, answer in found.items() if answer != "equal"}


def test_positions_of_packed_documents_are_told_from_other_integers() -> None:
    for lengths in ((48,), (7, 30, 1, 10), (1, 47), (1, 1, 46), (46, 1, 1), (20, 28)):
        positions = torch.cat([torch.arange(length) for length in lengths])
        assert _counts_positions(positions.repeat(2, 1), 1), lengths
        assert _counts_positions(positions.repeat(3, 2, 1).int() + 2, -1), "from 2, as OPT counts"
    ones, ids = torch.ones(2, 48, dtype=torch.long), batch()[0]
    for other in (ones, 0 * ones, ids, ones.cumsum(1) // 5, torch.full_like(ones, -100), positions.float()):
        assert not _counts_positions(other, 1)


class Counting(nn.Module):
    """A model that calls arange over the tokens that it sees."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.embed, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(2 * S, 16)
        self.route, self.layers = nn.Linear(16, 3), nn.ModuleList(Plain().float() for _ in range(2))
        self.register_buffer("table", torch.randn(2 * S, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        rows = torch.arange(ids.shape[1])
        counted = torch.ones_like(ids).cumsum(1)
        if self.use == "embedding":
            x = x + self.places(rows)
        elif self.use == "table":
            x = x + self.table[counted - 1]
        elif self.use == "wave":
            x = x + torch.sin(rows[:, None] / 10)
        elif self.use == "routed":
            x = self.routed(x)
        elif self.use == "mask":
            _ = rows[:, None] >= rows, counted[:, :1]
        for layer in self.layers:
            x = x + layer.attend(x)  # type: ignore[operator]
            x = self.routed(x) if self.use == "routed" else x
        return x

    def routed(self, x: Tensor) -> Tensor:
        """Rows in the order of their experts, and back."""
        hidden = x.flatten(0, 1)
        order = self.route(hidden).argmax(-1).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        rows = torch.arange(len(order)).roll(1)
        return x + (hidden[order].tanh()[back] + torch.zeros_like(hidden).index_add(0, rows, hidden[rows])).view_as(x)


def run_counting(use: str) -> str:
    torch.manual_seed(1)
    model, ids = Counting(use), batch()[0][:1]
    want = model(ids)
    try:
        with context_parallel(make_cp(), [ids], [1], model=model) as plan:
            out = model(ids)
            out.square().sum().backward()
    except PlanError as error:
        return str(error)
    error, size = (plan.unshard(out.detach()) - want).abs().max(), want.abs().max()
    return "equal" if error < 2e-6 * size else f"silent: off by {error:.3g} of {size:.3g}"


@pytest.mark.parametrize(
    ("use", "answer"),
    [
        ("routed", "equal"),
        ("mask", "equal"),
        ("embedding", "arange counted 24 tokens before attention: positions within a rank's shard"),
        ("table", "cumsum counted 24 tokens before attention"),
        ("wave", "arange counted 24 tokens before attention"),
    ],
)
def test_a_count_is_refused_where_attention_depends_on_it_as_a_position(
    ranks: Callable[[int], RankPool], use: str, answer: str
) -> None:
    found = ranks(2)(run_counting, use)
    assert all(answer in one for one in found), found
