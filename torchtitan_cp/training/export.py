"""Checkpoints in Hugging Face's format: one on request, or every stage's end while a run trains."""

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan_cp.checkpoint.hub import (
    WEIGHT_FILES,
    files_by_tensor,
    hub_names,
    name_in_text_model,
    open_tensors,
    save_hub_weights,
    stored_bytes,
)
from torchtitan_cp.checkpoint.hub_rope import rope_changes, rope_parameters
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.manifest import MANIFEST_FILE
from torchtitan_cp.checkpoint.save import sync
from torchtitan_cp.checkpoint.weights import SavedModel, open_saved_model
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import HubConfig, ModelArgs, StoredTensor
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.rope import Rope
from torchtitan_cp.config.run_folder import CHECKPOINTS
from torchtitan_cp.config.sections import Model
from torchtitan_cp.data.corpus.chat import CONFIG_FILE, ChatTemplate
from torchtitan_cp.data.corpus.store import read_json, write_json
from torchtitan_cp.data.corpus.tokenizer import SPACE_MARK, SentencePieceTokenizer, Tokenizer, tokenizer_files
from torchtitan_cp.data.corpus.tokenizer_files import MAP_FILE, read_tokenizer_files
from torchtitan_cp.runtime.watchdog import set_activity
from torchtitan_cp.training.adapters import merged_tensors, write_adapter
from torchtitan_cp.training.chat import chat_templates_of, end_tokens_of
from torchtitan_cp.training.data_pipeline import tokenizer_of
from torchtitan_cp.training.read_back import check_rotaries, knows
from torchtitan_cp.training.registry import (
    args_from,
    config_for_hub,
    hub_folder,
    hub_of,
    model_args_of,
    sizes_of,
    start_config,
    start_folder,
)

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0  # polling reads every checkpoint's manifest: half a second for 200 of them, of 1,024 ranks each
# Keys of a config.json that a stage's rope replaces; transformers prefers this length to the one in rope_parameters.
ROPE_PREFIXES = "rope_", "original_max_position_embeddings"
TOKENIZER_JSON = "tokenizer.json"
PLAIN_CLASS = "PreTrainedTokenizerFast"  # transformers' class that does just what the tokenizer's file says
SAMPLES = ("Hello world", "  two\n\n x\t1234", "na\u00efve \u6771\u4eac \U0001f389 ")

# (our name, tensor, dtype) -> tensors by their name on the hub
ToHub = Callable[[str, Tensor, torch.dtype], dict[str, Tensor]]


def start_exports(folder: Path, dtype: str, tokenizer: Tokenizer) -> Callable[[bool], None]:
    """Export the checkpoint of each stage's end to `hub/step-N` from a thread, and those that an earlier start missed.

    Args:
        folder: has `checkpoints`, from which stages are exported, and gets `hub`.
        dtype: checkpoint.export; nothing happens if it is "no".

    Returns:
        a function that ends the thread. Called with True, it waits until all stages are exported; with False, the
            run's next start exports what is missing.
    """
    if dtype == "no":
        return lambda wait: None
    ended = threading.Event()
    thread = threading.Thread(target=_export_stages, args=(folder, dtype, tokenizer, ended), name="export", daemon=True)
    thread.start()

    def finish(wait: bool) -> None:
        ended.set()
        if wait:
            set_activity("writing the last stage in Hugging Face's format", 0, float("inf"))
            thread.join()

    return finish


def _export_stages(folder: Path, dtype: str, tokenizer: Tokenizer, ended: threading.Event) -> None:
    """Export every stage's end, and again what was trained again, until `ended` is set.

    Failures are logged, and training goes on.
    """
    tried, is_last_poll = set[Path](), False
    while not is_last_poll:
        is_last_poll, stage_ends = ended.wait(POLL_SECONDS), list[Path]()
        try:
            stage_ends = CheckpointManager(folder / CHECKPOINTS).stage_ends()
        except OSError as error:
            logger.error("NO EXPORT: %s. The next poll or start tries again", error)
        for checkpoint in [path for path in stage_ends if path not in tried]:  # oldest first
            tried.add(checkpoint)
            out = folder / "hub" / checkpoint.name
            try:
                if not _is_exported(checkpoint, out):
                    _write_export(checkpoint, out, dtype, tokenizer)
                    logger.info("%s is written, for transformers", out)
            except Exception as error:
                logger.error("NO EXPORT of %s: %s. The next start of the run tries again", checkpoint, error)


def _is_exported(checkpoint: Path, out: Path) -> bool:
    """Whether an export is as new as its checkpoint, which a run that went back may have written again."""
    return out.exists() and out.stat().st_mtime_ns >= (checkpoint / MANIFEST_FILE).stat().st_mtime_ns


def export(
    checkpoint: Path, out: Path, dtype: str = "float32", tokenizer: Tokenizer | None = None, *, merge: bool = False
) -> None:
    """Write weights, config.json, generation_config.json, tokenizer and chat template; after a failure, none of them.

    Of a run with [lora] the weights are its adapters, in PEFT's format.

    Args:
        checkpoint: a step-N folder, or a run's folder.
        out: must not exist.
        dtype: of the weights as written; float32 keeps them as they were trained.
        tokenizer: with which the checkpoint was trained; None: it is loaded as the config says.
        merge: add the adapters to the weights beside them, and write the whole model.

    Raises:
        UserError: there is no intact checkpoint, or no adapters to merge, the format cannot express the model, or `out`
            exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", fix="give a new folder")
    _write_export(checkpoint, out, dtype, tokenizer, merge=merge)


def _write_export(checkpoint: Path, out: Path, dtype: str, tokenizer: Tokenizer | None, *, merge: bool = False) -> None:
    """As `export`, in place of an older one."""
    saved = open_saved_model(checkpoint)
    if merge and saved.config.lora is None:
        raise ConfigError(f"{saved.path} has no adapters to merge", fix="leave out --merge")
    args = args_from(saved.config.model, saved.sizes)
    hub = hub_of(saved.config.model)
    length = _length(saved, args)
    config = config_for_hub(saved.config.model, args, length, saved.stage.rope)
    tokenizer = tokenizer or tokenizer_of(saved.config)
    to_hub = hub.writer(args) if hub.writer else partial(_by_names, args, hub.names)
    unfinished = out.with_name(f"{out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        if saved.config.lora and not merge:
            write_adapter(saved, args, unfinished, getattr(torch, dtype))
        else:
            tensors = merged_tensors(saved, args) if merge else (saved.tensors, saved.read)
            _write_weights(*tensors, to_hub, _kept_tensors(saved, args), unfinished, getattr(torch, dtype))
        _write_settings(saved, config, args, length, tokenizer, dtype, unfinished)
        _read_back(saved, args, unfinished)
        for path in (*unfinished.rglob("*"), unfinished):
            sync(path)
        shutil.rmtree(out, ignore_errors=True)
        unfinished.rename(out)
        sync(out.parent)
    finally:
        # After a failure checkpoints may need the space.
        shutil.rmtree(unfinished, ignore_errors=True)


def _length(saved: SavedModel, args: ModelArgs) -> int:
    """Length to write: of the last stage, or of the checkpoint the run started from if that is longer.

    The latter holds only while the stage has that checkpoint's rotary embedding.
    """
    length, rope, model = saved.stage.seq_len, saved.stage.rope, saved.config.model
    if not (model.hub_checkpoint and model.load_weights):
        return length
    start = start_config(model, args)
    start_length = start.get("max_position_embeddings") or 0
    return length if rope and rope_changes(start, rope, args.rotary_dim) else max(length, start_length)


def _by_names(
    args: ModelArgs, names: Mapping[str, str], name: str, tensor: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A `ToHub` for an architecture with `Hub.names`. A tied output is stored as the embedding only."""
    if args.tie_embeddings and name == "output.weight":
        return {}
    entries = hub_names(name, tensor.shape, names)
    return {hub_name: (tensor if entry is None else tensor[entry]).to(dtype) for hub_name, entry in entries}


def _kept_tensors(saved: SavedModel, args: ModelArgs) -> dict[str, StoredTensor]:
    """Tensors of the checkpoint that the run started from which an export has unchanged; hub name -> slice of a file.

    If its files are gone, a warning says so.
    """
    model = saved.config.model
    if not (model.hub_checkpoint and model.load_weights):
        return {}
    try:
        folder = hub_folder(model, WEIGHT_FILES)
        names = hub_of(model).kept(args, files_by_tensor(folder))
        kept = {name_in_text_model(name): tensor for name, tensor in open_tensors(folder, sorted(names)).items()}
    except ConfigError as error:
        logger.warning("heads that predict further tokens, if the run's start has any, are not exported: %s", error)
        return {}
    if kept:
        logger.info("%d tensors of heads that predict further tokens are exported as they are in %s", len(kept), folder)
    return kept


def _write_weights(
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
    read_ours: Callable[[list[str]], dict[str, Tensor]],
    to_hub: ToHub,
    kept: dict[str, StoredTensor],
    out: Path,
    dtype: torch.dtype,
) -> None:
    """Write a whole model.

    Args:
        tensors: our name -> (size, dtype).
        read_ours: our names -> whole tensors on the host.
    """
    sources, sizes = dict[str, str](), dict[str, int]()
    for name, (size, saved_dtype) in tensors.items():
        for hub_name, tensor in to_hub(name, torch.empty(size, dtype=saved_dtype, device="meta"), dtype).items():
            sources[hub_name], sizes[hub_name] = name, tensor.nbytes
    sizes |= {name: stored_bytes(tensor) for name, tensor in kept.items()}

    def read(hub_names: list[str]) -> dict[str, Tensor]:
        values = read_ours(list({sources[hub_name] for hub_name in hub_names if hub_name in sources}))
        converted: dict[str, Tensor] = {name: kept[name][:] for name in hub_names if name in kept}
        for name in list(values):
            tensors = to_hub(name, values.pop(name), dtype)
            # safetensors refuses tensors that share memory, as the entries of a stack do.
            converted |= {hub_name: tensors[hub_name].clone() for hub_name in hub_names if hub_name in tensors}
        return converted

    save_hub_weights(out, sizes, read)


def written_config(
    model: Model, config: HubConfig, args: ModelArgs, length: int, rope: Rope | None, tokens: HubConfig
) -> HubConfig:
    """The config.json of an export.

    A run that started from the weights of model.hub_checkpoint keeps the other keys of that checkpoint's config.json.

    Args:
        config: of these ModelArgs, as `config_for_hub` gives it.
        length: max_position_embeddings to write.
        rope: what the weights were trained with; None: the default one of theta 10,000.
        tokens: ids of the tokenizer's BOS and EOS, for fresh weights.
    """
    starts = bool(model.hub_checkpoint and model.load_weights)
    if hub_of(model).load:
        values = config if starts else {**config, **tokens}
    else:
        if starts:
            start = start_config(model, args)
            kept = (key for key in start if not key.startswith(ROPE_PREFIXES) and "dtype" not in key)
            tokens = {key: start[key] for key in kept}
        trained_rope = rope_parameters(rope or Rope(), args.rotary_dim)
        values = {**tokens, **config, "max_position_embeddings": length, "rope_parameters": trained_rope}
    # Programs older than transformers 5 read these keys, if all layers share one rotary embedding.
    written_rope = values.get("rope_parameters") or {}
    older = {key: written_rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in written_rope}
    if older:
        older["rope_scaling"] = None if written_rope.get("rope_type", "default") == "default" else written_rope
    return {**values, **older}


def _write_settings(
    saved: SavedModel, config: HubConfig, args: ModelArgs, length: int, tokenizer: Tokenizer, dtype: str, out: Path
) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and the chat template.

    A run that started from the weights of model.hub_checkpoint keeps the other keys of that checkpoint's files.

    Args:
        config: the model's sizes, with keys as in config.json.
        length: max_position_embeddings to write.
    """
    weights_folder = start_folder(saved.config.model) if saved.config.model.load_weights else None
    tokens: HubConfig = {"bos_token_id": next(iter(tokenizer.bos_ids), None), "eos_token_id": tokenizer.eos_id}
    values = written_config(saved.config.model, config, args, length, saved.stage.rope, tokens) | {"dtype": dtype}
    write_json(out / "config.json", values)
    stored = read_json(weights_folder / "generation_config.json") if weights_folder else None
    generation: HubConfig = stored or {"eos_token_id": values.get("eos_token_id")}
    templates = chat_templates_of(saved.config)
    if len(templates) > 1:
        logger.warning("the sources have different chat templates; %s has that of the first with conversations", out)
    write_tokenizer(saved.config, tokenizer, next(iter(templates), None), saved.stage.seq_len, out)
    stored_ends = generation.get("eos_token_id")
    ends = {tokenizer.eos_id, *end_tokens_of(templates, tokenizer)}
    ends |= {*stored_ends} if isinstance(stored_ends, list) else {stored_ends}
    generation["eos_token_id"] = sorted(ends - {None})
    write_json(out / "generation_config.json", generation)


def _read_back(saved: SavedModel, args: ModelArgs, out: Path) -> None:
    """Read the written config.json as this program does, and as transformers does where that is installed.

    Raises:
        ConfigError: one of them does not, or transformers would compute other rotary frequencies than training did.
    """
    model, stage = saved.config.model, saved.stage
    model_args_of(Model(architecture=model.architecture, hub_checkpoint=str(out)))
    written = read_json(out / "config.json") or {}
    if not knows(written):
        return logger.info("config.json is not read back: there is no transformers that has %s", written["model_type"])
    start = sizes_of(args)["config"] if hub_of(model).load else None
    rope = stage.rope if start else stage.rope or Rope()
    try:
        check_rotaries(written, rope, args.rotary_dim, stage.seq_len, start)
    except ValueError as error:
        raise ConfigError(
            f"{saved.path} is not exported: {error}", fix="give a stage's rope that the model's config.json can express"
        ) from None


def write_tokenizer(
    config: Config, tokenizer: Tokenizer, template: ChatTemplate | None, length: int, out: Path
) -> None:
    """Write the tokenizer's files and chat templates so that transformers' AutoTokenizer reads text as training did.

    Args:
        config: says where the tokenizer is, and the checkpoint that the run started from, whose files go along.
        length: trained sequence length in tokens; a smaller `model_max_length` of the tokenizer is raised to it.
    """
    settings = config.tokenizer
    for name, path in tokenizer_files(settings, tokenizer, start_folder(config.model)).items():
        shutil.copyfile(path, out / name)
    if template:
        template.save(out)
    if tokenizer.path:
        # Without a class, transformers makes a tokenizer of the model's family, which may split text differently.
        values: HubConfig = {"tokenizer_class": PLAIN_CLASS, "eos_token": tokenizer.eos_token}
        values |= (template.variables if template else {}) | (read_json(out / CONFIG_FILE) or {})
        if template:
            values.pop("chat_template", None)  # the files are the run's, this need not be
        if (values.get("model_max_length") or length) < length:
            values["model_max_length"] = length
        write_json(out / CONFIG_FILE, values)
        if read_tokenizer_files(out).names.get("eos_token") != tokenizer.eos_token:
            # The files beside the run's tokenizer named none, and those of the checkpoint it started from another.
            write_json(out / CONFIG_FILE, {**values, "eos_token": tokenizer.eos_token})
            special_map = read_json(out / MAP_FILE) or {}
            write_json(out / MAP_FILE, {name: token for name, token in special_map.items() if name != "eos_token"})
        if settings.path:
            conversations = any(source.conversations for source in config.data.by_name().values())
            try:
                _match_tokenizer(tokenizer, values["tokenizer_class"], out, conversations)
            except Exception as error:  # transformers raises errors of many types
                logger.warning("the exported tokenizer is not compared with %s: %s", tokenizer.path, error)


def _match_tokenizer(tokenizer: Tokenizer, class_name: str, out: Path, conversations: bool) -> None:
    """Make transformers read the exported tokenizer as training did, and warn if it still does not.

    Args:
        class_name: of transformers' tokenizer, as tokenizer_config.json gives it.
        conversations: the model was trained on some.
    """
    transformers = import_extra("transformers", extra="hub", needed_by="comparing the exported tokenizer")
    load = partial(transformers.AutoTokenizer.from_pretrained, out, local_files_only=True)
    exported = load()
    has_json = (out / TOKENIZER_JSON).exists()
    if isinstance(tokenizer, SentencePieceTokenizer) and class_name == PLAIN_CLASS and not has_json:
        # transformers converts all of a SentencePiece model except its treatment of spaces.
        _set_spaces(exported.backend_tokenizer, tokenizer.spaces, conversations)
        exported.backend_tokenizer.save(str(out / TOKENIZER_JSON))
        exported = load()
    around = conversations or not isinstance(tokenizer, SentencePieceTokenizer)
    for text in (_text_read_unlike(tokenizer, exported), _token_read_unlike(tokenizer, exported, around=around)):
        if text is not None:
            logger.warning(
                "THE EXPORTED TOKENIZER reads text unlike %s in training, e.g. %r: it is read as %s",
                *(tokenizer.path, text, type(exported).__name__),
            )


def _text_read_unlike(tokenizer: Tokenizer, exported: "PreTrainedTokenizerBase") -> str | None:
    """The first sample of plain text that transformers' tokenizer reads otherwise than training."""
    for text, ids in zip(SAMPLES, tokenizer.encode_batch(SAMPLES), strict=True):
        expected = [*tokenizer.bos_ids, *ids.tolist()]
        # Behind the text it may add an end token, which training adds at the end of a document.
        same_start = exported(text)["input_ids"][: len(expected)] == expected
        if exported(text, add_special_tokens=False)["input_ids"] != ids.tolist() or not same_start:
            return text
    return None


def _token_read_unlike(tokenizer: Tokenizer, exported: "PreTrainedTokenizerBase", *, around: bool) -> str | None:
    """The first text with an added or special token that transformers' tokenizer reads otherwise than training.

    Args:
        around: text around the token is compared too.
    """
    if exported.eos_token_id != tokenizer.eos_id:
        return tokenizer.eos_token
    tokens = dict.fromkeys([*(token.content for token in tokenizer.added), *exported.get_added_vocab()])
    texts = [f"a{token}b {token} c" if around else token for token in tokens]
    rows = zip(
        texts, tokenizer.encode_chat_batch(texts), exported(texts, add_special_tokens=False)["input_ids"], strict=True
    )
    return next((text for text, (ids, _), theirs in rows if ids.tolist() != theirs), None)


def _set_spaces(backend: "tokenizers.Tokenizer", spaces: str, conversations: bool) -> None:
    """Normalize spaces as a SentencePiece model that writes "   a" as `spaces`.

    Args:
        backend: a `tokenizers.Tokenizer`, changed in place.
        conversations: put no space after a special token. A text that begins with a space then gets no second one.
    """
    library = import_extra("tokenizers", extra="hub", needed_by="comparing the exported tokenizer")
    normalizers, mark = library.normalizers, SPACE_MARK
    steps = list(backend.normalizer)[:-1]
    if spaces in ("a", f"{mark}a"):
        steps += [normalizers.Strip(), normalizers.Replace(library.Regex(" {2,}"), " ")]
    if spaces in (f"{mark}a", f"{4 * mark}a"):
        if conversations:
            backend.pre_tokenizer = library.pre_tokenizers.Metaspace(mark, prepend_scheme="first", split=False)
        else:
            steps.append(normalizers.Prepend(mark))
        backend.decoder = library.decoders.Sequence([backend.decoder, library.decoders.Strip(" ", 1, 0)])
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", mark)])
