"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, to and from.

The base model is not in it. Source: the checkpoint format of huggingface.co/docs/peft.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchtitan_cp.checkpoint.hub import hub_names, read_shard, same_values
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import Hub, StoredTensor
from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.training import Lora

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MATRICES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}  # ours, and theirs
# Ends of names that PEFT takes for an expert's projections, in families whose experts transformers 5 has in one tensor.
EXPERT_PROJECTIONS = ".gate_proj", ".up_proj", ".down_proj"
# Keys of adapter_config.json with which PEFT computes something else than [lora], and the values that are no such case.
OTHER_KEYS = {
    **{"use_dora": (False,), "fan_in_fan_out": (False,), "bias": ("none",), "rank_pattern": ({},)},
    **{"alpha_pattern": ({},), "layer_replication": (None,), "alora_invocation_tokens": (None,)},
    **{"target_parameters": (None, []), "trainable_token_indices": (None,), "lora_bias": (False,)},
    # PiSSA, CorDA, OLoRA and LoftQ change the base model's weights when the adapter is loaded.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}


def hub_module(module: str, hub: Hub) -> str:
    """The name of one of our linear layers in the model of transformers."""
    if hub.load:
        return module
    [(name, _)] = hub_names(f"{module}.weight", (), hub.names)
    return name.removesuffix(".weight")


class Trained(NamedTuple):
    """A trained parameter of the whole model.

    Attributes:
        shape: of the whole parameter.
        other_names: if it is tied, its further names in our model.
    """

    shape: tuple[int, ...]
    other_names: tuple[str, ...] = ()


def peft_names(trained: Mapping[str, Trained], hub: Hub) -> dict[str, list[str]]:
    """Our name of each trained parameter -> its names in PEFT's file, which has a tied one once for each name.

    Args:
        trained: by our names.

    Raises:
        ConfigError: PEFT has no name for one, as for experts, which are a tensor each there.
    """
    return {
        name: [_peft_name(each, parameter.shape, hub) for each in (name, *parameter.other_names)]
        for name, parameter in trained.items()
    }


def _peft_name(name: str, shape: Sequence[int], hub: Hub) -> str:
    module, _, leaf = name.rpartition(".")
    if leaf in MATRICES:
        return f"{PREFIX}{hub_module(module, hub)}.{MATRICES[leaf]}"
    found = [(name, None)] if hub.load else hub_names(name, shape, hub.names)
    if len(found) > 1 or found[0][1] is not None:
        raise ConfigError(
            f"PEFT's format has no place for {name}, which [lora] trains whole", fix="export the whole model: --merge"
        )
    return PREFIX + found[0][0]


def check_whole_modules(model: nn.Module, trained: Iterable[str]) -> None:
    """Refuse a parameter that is trained whole in a module with others inside: PEFT trains and saves whole modules.

    Args:
        model: the whole one, without adapters.
        trained: names of its parameters that are trained whole.

    Raises:
        ConfigError: naming the parameter.
    """
    for name in trained:
        owner = name.rpartition(".")[0]
        inner = next((each for each, _ in model.get_submodule(owner).named_parameters() if "." in each), None)
        if inner:
            raise ConfigError(
                f"PEFT's format has no place for {name}, which [lora] trains whole: PEFT trains whole modules, and "
                f"{owner} contains {inner} too",
                fix="export the whole model: --merge",
            )


def is_of_adapter(peft_name: str) -> bool:
    """Whether a tensor of PEFT's file is a matrix of an adapter, not a weight that is trained whole."""
    return peft_name.endswith(tuple(MATRICES.values()))


def adapter_config(
    lora: Lora, base: str, adapted: Iterable[str], others: Iterable[str], whole: Sequence[str]
) -> JsonObject:
    """The adapter_config.json that PEFT reads.

    Args:
        base: folder of the base model, or its name on the hub.
        adapted: hub names of the layers with adapters; others: those of the model's other modules.
        whole: hub names of the modules that are trained whole.
    """
    adapted, others = list(adapted), {name.rpartition(".")[2] for name in others}
    ends = sorted({name.rpartition(".")[2] for name in adapted})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_rslora": lora.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        # A last name such as q_proj stands for all layers that end so.
        "target_modules": list(adapted) if others & {*ends} else list(ends),
        "modules_to_save": list(whole) or None,
    }


def save_adapter(folder: Path, config: JsonObject, tensors: dict[str, Tensor]) -> None:
    """Write both files; `tensors` by their names in PEFT's format."""
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def check_adapter(folder: Path, lora: Lora) -> None:
    """Refuse an adapter that is not of [lora].

    Raises:
        ConfigError: its settings cannot be read, or differ.
    """
    where = f"model.adapter: {folder}"
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        scale = config["r"], config["lora_alpha"], config.get("use_rslora", False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} has no {CONFIG_FILE} that can be read: {error}",
            fix=f"give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT saves it",
        ) from None
    if config.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{where} is an adapter of the type {config['peft_type']}", fix="give one of LoRA")
    for key, allowed in OTHER_KEYS.items():
        if (value := config.get(key)) and value not in allowed:
            raise ConfigError(
                f"{where} has {key} = {value!r}, which [lora] does not have",
                fix="give another adapter, or start from the model that PEFT merges it into",
            )
    if scale != (lora.rank, lora.alpha, lora.rslora):
        raise ConfigError(
            f"{where} has r = {scale[0]}, lora_alpha = {scale[1]} and use_rslora = {scale[2]}, and [lora] has rank = "
            f"{lora.rank}, alpha = {lora.alpha} and rslora = {lora.rslora}",
            fix=f"set lora.rank = {scale[0]}, lora.alpha = {float(scale[1])} and lora.rslora = {str(scale[2]).lower()}",
        )


def load_adapter(folder: Path, parts: Iterable[nn.Module], trained: Mapping[str, Trained], hub: Hub) -> None:
    """Fill adapters, and what is trained whole, from PEFT's file; each rank reads its own shards.

    Args:
        parts: of a model with adapters, sharded in any way.
        trained: parameters of the whole model, by our names.

    Raises:
        ConfigError: the file lacks one of them, or has others.
    """
    names = peft_names(trained, hub)
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            stored: dict[str, StoredTensor] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            _check_names(folder, names, stored)
            for name, parameter in ((n, p) for part in parts for n, p in part.named_parameters() if n in names):
                tensor = stored[names[name][0]]
                if tensor.get_shape() != list(parameter.shape):
                    shape, wanted = tensor.get_shape(), list(parameter.shape)
                    raise _unfitting(folder, f"has {names[name][0]} of the shape {shape}, and [lora] makes {wanted}")
                read_shard(tensor, [0] * parameter.ndim, parameter)
    except (OSError, SafetensorError) as error:
        raise _unfitting(folder, f"has no {WEIGHTS_FILE} that can be read: {error}") from None


def _check_names(folder: Path, names: Mapping[str, list[str]], stored: Mapping[str, StoredTensor]) -> None:
    """Refuse a file that lacks a tensor of [lora], has one that it leaves out, or unties what the model ties."""
    firsts, known = {found[0] for found in names.values()}, {name for found in names.values() for name in found}
    if lacking := sorted(firsts - {*stored}):
        raise _unfitting(folder, f"has no {lacking[0]}, and [lora] trains {len(firsts)} tensors")
    if unknown := sorted({*stored} - known):
        raise _unfitting(folder, f"has {unknown[0]}, which [lora] does not train")
    for first, other in ((found[0], other) for found in names.values() for other in found[1:]):
        if other not in stored or not same_values(stored[first], stored[other]):
            raise ConfigError(
                f"model.adapter: {folder} has {first}, and {'other values in' if other in stored else 'no'} {other}, "
                "which the model ties to it: with PEFT the two differ",
                fix="train it with ensure_weight_tying = True, or start from the model that PEFT merges it into, with "
                "tie_word_embeddings = false in its config.json",
            )


def _unfitting(folder: Path, problem: str) -> ConfigError:
    fix = "set lora.targets and lora.train to the adapter's target_modules and modules_to_save, by our names of modules"
    return ConfigError(f"model.adapter: {folder} {problem}", fix=fix)
