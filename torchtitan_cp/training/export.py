"""Checkpoints in Hugging Face's format: one on request, or every stage's end while a run trains."""

import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_cp.checkpoint.hub import hub_names, rope_changes, rope_parameters, save_hub_weights
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.save import sync
from torchtitan_cp.checkpoint.weights import SavedModel, open_saved_model
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import CHECKPOINTS
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.sections import Rope
from torchtitan_cp.data.corpus.chat import CONFIG_FILE, TEMPLATE_FILE, ChatTemplate
from torchtitan_cp.data.corpus.store import read_json, write_json
from torchtitan_cp.data.corpus.tokenizer import SPACE_MARK, SentencePieceTokenizer, Tokenizer, tokenizer_files
from torchtitan_cp.runtime.watchdog import set_activity
from torchtitan_cp.training.chat import chat_template_of, end_tokens
from torchtitan_cp.training.data_pipeline import tokenizer_of
from torchtitan_cp.training.registry import args_from, config_for_hub, hub_config, hub_of, start_folder

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0  # a look reads the manifest of every checkpoint, half a second for 200 of 1,024 ranks
TOKENIZER_JSON = "tokenizer.json"
ANY_TOKENIZER = "PreTrainedTokenizerFast"  # transformers' class that reads a tokenizer as its file says
SAMPLES = ("Hello world", "  two\n\n x\t1234", "na\u00efve \u6771\u4eac \U0001f389 ")

# (our name, tensor, dtype) -> tensors by hub name
ToHub = Callable[[str, Tensor, torch.dtype], dict[str, Tensor]]


def start_exports(folder: Path, dtype: str, tokenizer: Tokenizer) -> Callable[[bool], None]:
    """Export the checkpoints of stage ends to `hub/step-N` from a thread, also those that an earlier start missed.

    Args:
        folder: of the run.
        dtype: checkpoint.export; nothing happens if it is "no".

    Returns:
        what ends the thread: given True it waits for the last stage's, given False the next start exports what is
            missing.
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
    """Failures are logged, and training goes on."""
    tried, last = set[Path](), False
    while not last:
        last, found = ended.wait(POLL_SECONDS), list[Path]()
        try:
            found = CheckpointManager(folder / CHECKPOINTS).stage_ends()
        except OSError as error:
            logger.error("NO EXPORT: %s. The next look or start tries again", error)
        for path in [path for path in found if path not in tried]:  # oldest first
            tried.add(path)
            out = folder / "hub" / path.name
            try:
                if not out.exists():
                    export(path, out, dtype, tokenizer)
                    logger.info("%s is written, for transformers", out)
            except Exception as error:
                logger.error("NO EXPORT of %s: %s. The next start of the run tries again", path, error)


def export(checkpoint: Path, out: Path, dtype: str = "float32", tokenizer: Tokenizer | None = None) -> None:
    """Write weights, config.json, generation_config.json, tokenizer and chat template; all of them, or nothing.

    Args:
        checkpoint: a step-N folder, or a run's.
        out: must not exist.
        dtype: of the weights as written; float32 keeps them as they were trained.
        tokenizer: of the run, if it is loaded.

    Raises:
        UserError: there is no checkpoint or a damaged one, the format cannot express the model, or OUT exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", fix="give a new folder")
    saved = open_saved_model(checkpoint)
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
        _write_weights(saved, to_hub, unfinished, getattr(torch, dtype))
        _write_settings(saved, config, args, length, tokenizer, dtype, unfinished)
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        unfinished.rename(out)
        sync(out.parent)
    finally:
        # After a failure checkpoints may need the space.
        shutil.rmtree(unfinished, ignore_errors=True)


def _length(saved: SavedModel, args: Any) -> int:
    """Tokens of the last stage, or more if the checkpoint it started from has more, by the same rotary embedding."""
    length, rope, model = saved.stage.seq_len, saved.stage.rope, saved.config.model
    if not (model.hub_checkpoint and model.load_weights):
        return length
    before = args.config if hub_of(model).load else hub_config(model)
    own = before.get("text_config", before).get("max_position_embeddings") or 0
    return length if rope and rope_changes(before, rope, args.rotary_dim) else max(length, own)


def _by_names(args: Any, names: Mapping[str, str], name: str, tensor: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """For an architecture that says what its parameters are called there. A tied output is stored as the embedding."""
    if args.tie_embeddings and name == "output.weight":
        return {}
    entries = hub_names(name, tensor.shape, names)
    return {hub_name: (tensor if entry is None else tensor[entry]).to(dtype) for hub_name, entry in entries}


def _write_weights(saved: SavedModel, to_hub: ToHub, out: Path, dtype: torch.dtype) -> None:
    sources, sizes = dict[str, str](), dict[str, int]()
    for name, (size, own) in saved.tensors.items():
        for hub_name, tensor in to_hub(name, torch.empty(size, dtype=own, device="meta"), dtype).items():
            sources[hub_name], sizes[hub_name] = name, tensor.nbytes

    def read(hub_names: list[str]) -> dict[str, Tensor]:
        values = saved.read(list({sources[hub_name] for hub_name in hub_names}))
        found: dict[str, Tensor] = {}
        for name in list(values):
            tensors = to_hub(name, values.pop(name), dtype)
            # safetensors refuses tensors that share memory, as the entries of a stack do.
            found |= {hub_name: tensors[hub_name].clone() for hub_name in hub_names if hub_name in tensors}
        return found

    save_hub_weights(out, sizes, read)


def _write_settings(
    saved: SavedModel, config: dict[str, Any], args: Any, length: int, tokenizer: Tokenizer, dtype: str, out: Path
) -> None:
    """config.json with this length and the rotary embedding, the files of the tokenizer, and the chat template.

    A run that started from the weights of model.hub_checkpoint keeps the other keys and files of that checkpoint.
    """
    weights_folder = start_folder(saved.config.model) if saved.config.model.load_weights else None
    rope, hub = saved.stage.rope, hub_of(saved.config.model)
    own: dict[str, Any] = {"bos_token_id": next(iter(tokenizer.bos_ids), None), "eos_token_id": tokenizer.eos_id}
    if hub.load:
        values = config if weights_folder else {**config, **own}
    else:
        if weights_folder:
            before = hub_config(saved.config.model)
            before = before.get("text_config", before)  # of a model that sees pictures too
            own = {key: value for key, value in before.items() if not key.startswith("rope_") and "dtype" not in key}
        trained = rope_parameters(rope or Rope(), args.rotary_dim)
        values = {**own, **config, "max_position_embeddings": length, "rope_parameters": trained}
    # For readers older than transformers 5, where the rotary embedding is that of all layers.
    theirs = values.get("rope_parameters") or {}
    older = {key: theirs[key] for key in ("rope_theta", "partial_rotary_factor") if key in theirs}
    if older:
        older["rope_scaling"] = None if theirs.get("rope_type", "default") == "default" else theirs
    values = {**values, **older, "dtype": dtype}
    write_json(out / "config.json", values)
    stored = read_json(weights_folder / "generation_config.json") if weights_folder else None
    generation = stored or {"eos_token_id": values.get("eos_token_id")}
    template = chat_template_of(saved.config)
    write_tokenizer(saved.config, tokenizer, template, saved.stage.seq_len, out)
    known = generation.get("eos_token_id")
    ends = end_tokens(template, tokenizer) if template else [tokenizer.eos_id]
    generation["eos_token_id"] = sorted({*ends, *(known if isinstance(known, list) else [known])} - {None})
    write_json(out / "generation_config.json", generation)


def write_tokenizer(
    config: Config, tokenizer: Tokenizer, template: ChatTemplate | None, length: int, out: Path
) -> None:
    """The tokenizer's files and the chat template, so that transformers' AutoTokenizer reads text as training does.

    Args:
        config: of the run.
        length: tokens that the model was trained with at once; a smaller limit of the tokenizer becomes this.
    """
    settings = config.tokenizer
    for name, path in tokenizer_files(settings, tokenizer, start_folder(config.model)).items():
        shutil.copyfile(path, out / name)
    if template:
        (out / TEMPLATE_FILE).write_text(template.source, encoding="utf-8")
    if tokenizer.path:
        # Without a class, transformers makes a tokenizer of the model's family, which may split text otherwise.
        own: dict[str, Any] = {"tokenizer_class": ANY_TOKENIZER, "eos_token": tokenizer.eos_token}
        own |= (template.variables if template else {}) | (read_json(out / CONFIG_FILE) or {})
        if (own.get("model_max_length") or length) < length:
            own["model_max_length"] = length
        write_json(out / CONFIG_FILE, own)
        # A tokenizer.json by itself leaves transformers no choice.
        sure = (settings.kind, own["tokenizer_class"], settings.bos) == ("huggingface", ANY_TOKENIZER, True)
        if settings.path and not sure:
            chats = any(source.conversations for source in config.data.by_name().values())
            try:
                _match_tokenizer(tokenizer, own["tokenizer_class"], out, chats=chats)
            except Exception as error:  # transformers raises what it likes
                logger.warning("the exported tokenizer is not compared with %s: %s", tokenizer.path, error)


def _match_tokenizer(tokenizer: Tokenizer, name: str, out: Path, *, chats: bool) -> None:
    """Warn if transformers, by the class of this name, splits or begins text unlike training.

    Args:
        chats: the model read conversations.
    """
    transformers = import_extra("transformers", extra="hub", needed_by="comparing the exported tokenizer")

    def load() -> Any:
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # it reads config.json too, and warns of some
        try:
            return transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
        finally:
            transformers.logging.set_verbosity(verbosity)

    theirs = load()
    if isinstance(tokenizer, SentencePieceTokenizer) and name == ANY_TOKENIZER and not (out / TOKENIZER_JSON).exists():
        # Of the model it reads everything except what becomes of spaces.
        _set_spaces(theirs.backend_tokenizer, tokenizer.spaces, chats)
        theirs.backend_tokenizer.save(str(out / TOKENIZER_JSON))
        theirs = load()
    for text, ids in zip(SAMPLES, tokenizer.encode_batch(SAMPLES), strict=True):
        split, whole = (theirs(text, add_special_tokens=add)["input_ids"] for add in (False, True))
        own = [*tokenizer.bos_ids, *ids.tolist()]
        if split != ids.tolist() or whole[: len(own)] != own:
            does = "begins" if split == ids.tolist() else "splits"
            logger.warning(
                "THE EXPORTED TOKENIZER %s text unlike %s in training, e.g. %r: it is read as %s",
                *(does, tokenizer.path, text, type(theirs).__name__),
            )
            return


def _set_spaces(backend: Any, spaces: str, chats: bool) -> None:
    """Normalize spaces as the SentencePiece model does that writes "   a" as `spaces`.

    Args:
        chats: put no space after a special token; then a text that begins with a space gets no other either.
    """
    library = import_extra("tokenizers", extra="hub", needed_by="comparing the exported tokenizer")
    normalizers, mark = library.normalizers, SPACE_MARK
    steps = list(backend.normalizer)[:-1]
    if spaces in ("a", f"{mark}a"):
        steps += [normalizers.Strip(), normalizers.Replace(library.Regex(" {2,}"), " ")]
    if spaces in (f"{mark}a", f"{4 * mark}a"):
        if chats:
            backend.pre_tokenizer = library.pre_tokenizers.Metaspace(mark, prepend_scheme="first", split=False)
        else:
            steps.append(normalizers.Prepend(mark))
        backend.decoder = library.decoders.Sequence([backend.decoder, library.decoders.Strip(" ", 1, 0)])
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", mark)])
