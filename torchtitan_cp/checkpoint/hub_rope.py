"""A stage's rotary embedding as Hugging Face's config.json has it, to and from."""

from contextlib import suppress
from dataclasses import replace

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import HubConfig
from torchtitan_cp.config.load import build
from torchtitan_cp.config.rope import KEYS_BY_KIND, Rope

# Keys of a stage's rope -> keys of config.json; one has another name there.
ROPE_KEYS = {key: key for keys in KEYS_BY_KIND.values() for key in keys}
ROPE_KEYS["original_seq_len"] = "original_max_position_embeddings"
ATTENTION_KEYS = {"attention_factor", "mscale", "mscale_all_dim"}


def rope_parameters(rope: Rope, head_dim: int) -> HubConfig:
    """A stage's rotary embedding as config.json's `rope_parameters`; head_dim is D."""
    if rope.kind == "ntk":  # another theta there
        return {"rope_type": "default", "rope_theta": rope.theta * rope.factor ** (head_dim / (head_dim - 2))}
    values = {ROPE_KEYS[key]: getattr(rope, key) for key in KEYS_BY_KIND[rope.kind]}
    if rope.kind == "longrope":
        values["short_factor"] = rope.short_factor or rope.long_factor
    # 0 and () stand for the paper's rule, as does a missing key in config.json.
    values = {key: list(x) if isinstance(x, tuple) else x for key, x in values.items() if x or x is False}
    return {"rope_type": "default" if rope.kind == "none" else rope.kind, "rope_theta": rope.theta, **values}


def fill_rope(rope: Rope, config: HubConfig) -> Rope:
    """A stage's rotary embedding, with theta and the keys of its kind that the TOML omits from a config.json.

    If that scales nothing, the length before scaling is its max_position_embeddings.

    Raises:
        ConfigError: config.json has a kind that no stage can have, or none that can be read.
    """
    if not {"theta", *KEYS_BY_KIND[rope.kind]}.intersection(rope.omitted):
        return rope
    stored, keys = hub_rope(config, rope.kind), set(rope.omitted)
    if not keys >= ATTENTION_KEYS:  # attention_factor and the two mscale exclude each other
        keys -= ATTENTION_KEYS
    elif "factor" not in keys and rope.factor != stored.factor:  # the stored attention_factor may follow from factor
        keys.remove("attention_factor")
    filled = replace(rope, **{key: getattr(stored, key) for key in keys})
    lacks_original = "original_seq_len" in KEYS_BY_KIND[rope.kind] and not filled.original_seq_len
    if lacks_original and _hub_rope_parameters(config)["rope_type"] == "default":
        trained = config.get("text_config", config).get("max_position_embeddings")
        filled = replace(filled, original_seq_len=trained or 0)
    vars(filled)["omitted"] = rope.omitted
    return filled


def hub_rope(config: HubConfig, wanted: str = "") -> Rope:
    """The rotary embedding of a config.json, as a stage has it.

    Args:
        wanted: kind of a stage. If config.json has another kind, only its theta is taken. "": take any kind.

    Raises:
        ConfigError: a kind of scaling that a stage cannot have, or values of the wrong type.
    """
    try:
        values, config = _hub_rope_parameters(config), config.get("text_config", config)
        trained, key = config.get("max_position_embeddings") or 0, ROPE_KEYS["original_seq_len"]
        # As in transformers, the original length beside the rope's parameters comes before the one among them.
        original = config.get(key) or values.get(key) or trained
        values = {"factor": trained / (original or 1), **values, key: original}
        if values.get("attention_factor") or not (values.get("mscale") and values.get("mscale_all_dim")):
            values |= {"mscale": 0.0, "mscale_all_dim": 0.0}
        kind, problem = str(values["rope_type"]), ""
    except (AttributeError, TypeError) as error:
        kind, problem = "", f" that cannot be read: {error}"
    if kind == "default" or (kind and kind != (wanted or kind)):
        kind = "none"
    if kind not in KEYS_BY_KIND:
        raise ConfigError(
            f"model.hub_checkpoint: config.json has a rotary embedding{problem or f' of type {kind!r}'}",
            fix=f"give each stage a rope of its own, of a kind among {', '.join(KEYS_BY_KIND)}",
        )
    keys = {key: values[ROPE_KEYS[key]] for key in KEYS_BY_KIND[kind] if ROPE_KEYS[key] in values}
    table = {"theta": values["rope_theta"], "kind": kind, **keys}
    return build(Rope, table, where="rope", file="config.json of model.hub_checkpoint")


def rope_changes(config: HubConfig, rope: Rope, head_dim: int) -> list[str]:
    """What a stage changes in the rotary embedding of a config.json; head_dim is D."""
    before, after = _hub_rope_parameters(config), rope_parameters(rope, head_dim)
    with suppress(ConfigError):  # a kind that no stage can have
        before = rope_parameters(hub_rope(config), head_dim)
    keys = "rope_type", "rope_theta", *ROPE_KEYS.values()
    return [f"{key} {before.get(key)} -> {after.get(key)}" for key in keys if before.get(key) != after.get(key)]


def _hub_rope_parameters(config: HubConfig) -> HubConfig:
    """`rope_parameters` of a config.json, for layers without a window; before transformers 5 two keys held them."""
    config = config.get("text_config", config)
    # If rope_theta is missing, as in Llama 2's config.json, transformers takes 10,000.
    older = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    newer = config.get("rope_parameters") or older
    full = newer.get("full_attention", newer) or {}  # null: these layers have no rotary embedding
    if full is not newer and "yarn" in (full.get("type"), full.get("rope_type")):
        full = {**full, "truncate": newer.get("truncate")}  # transformers reads it beside full_attention, not in it
    values = {key: value for key, value in full.items() if value is not None}
    return {"rope_type": values.get("type", "default"), "rope_theta": older["rope_theta"], **values}
