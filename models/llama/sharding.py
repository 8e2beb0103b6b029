"""The role of each module in tensor parallelism; `torchtitan_cp/parallel/tensor.py` implements the roles."""

SHARDING = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.w[qkv]": "column",
    "layers.*.attention.[qk]_norm": "heads",
    "layers.*.attention.sinks": "per_head",
    "layers.*.attention.wo": "row",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w[13]": "column",
    "layers.*.feed_forward.w2": "row",
    "norm": "sequence",
    "output": "output",
}
