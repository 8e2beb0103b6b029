"""Tensor parallelism of a mixture: attention is split by heads; a token's experts run on the rank that holds it."""

from models.llama.sharding import SHARDING as LLAMA

SHARDING = {name: role for name, role in LLAMA.items() if ".feed_forward" not in name} | {
    "layers.*.ffn_norm": "local_sequence",
    "layers.*.router.gate": "local_tokens",
    "layers.*.shared_experts": "gather",
    "layers.*.shared_experts.w[13]": "column",
    "layers.*.shared_experts.w2": "row",
}
