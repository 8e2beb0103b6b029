"""A run opened in Python, for inference and inspection: `open_run("outputs/run")`. It is no command."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models import ARCHITECTURES
from torchtitan_cp.checkpoint.weights import SavedModel, open_saved_model
from torchtitan_cp.cli.generate import encode_prompt, generate, load_model, new_caches, stream_text
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.config.json_types import Json
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.training.chat import chat_template_of, encode_turns, end_tokens
from torchtitan_cp.training.data_pipeline import tokenizer_of
from torchtitan_cp.training.registry import args_from, check_length, register

Prompt = str | Sequence[int] | Sequence[Mapping[str, Json]]
"""A text, token ids, or the messages of a conversation that the assistant is to answer."""


@dataclass(frozen=True)
class OpenRun:
    """A trained model with its tokenizer, on one device.

    Attributes:
        model: an nn.Module in the run's compute dtype, with the rotary embedding of the last stage it was trained in.
        tokenizer: `encode_batch`, `decode`, `eos_id`, ...
        saved: the checkpoint: `saved.config`, `saved.progress.step`, `saved.stage.seq_len`, ...
    """

    model: LanguageModel
    tokenizer: Tokenizer
    saved: SavedModel

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; ids stay as they are.

        Raises:
            ConfigError: messages, and the run has no chat template or one that does not take them; or more tokens than
                the model has positions.
        """
        messages = [message for message in prompt if isinstance(message, Mapping)]
        if messages:
            template = chat_template_of(self.saved.config)
            if not template:
                raise ConfigError(f"{self.saved.path} has no chat template", fix="give a text, or token ids")
            ids = encode_turns(template, self.tokenizer, messages)
        else:
            ids = encode_prompt(self.tokenizer, prompt) if isinstance(prompt, str) else [int(x) for x in prompt]  # type: ignore[arg-type]
        check_length(args_from(self.saved.config.model, self.saved.sizes), "the prompt", len(ids))
        return ids

    @torch.no_grad()
    def logits(self, prompt: Prompt) -> Tensor:
        """`[S, V]` in the compute dtype: row t scores what follows the first t + 1 tokens of the prompt."""
        ids, device = self.encode(prompt), next(self.model.parameters()).device
        tokens = torch.tensor([ids], device=device)
        out: Tensor = self.model(tokens, torch.arange(len(ids), device=device), iter(new_caches(self.model)))
        return out[0]

    def generate(self, prompt: Prompt, max_tokens: int = 200, temperature: float = 0.0, seed: int = 0) -> str:
        """The text that continues the prompt, or the answer to its messages; without the prompt.

        Args:
            temperature: divides the logits; 0 takes the most likely token.
        """
        ids, ends = self.encode(prompt), {self.tokenizer.eos_id}
        template = chat_template_of(self.saved.config) if not isinstance(prompt, str) else None
        if template:
            ends |= end_tokens(template, self.tokenizer)
        generator = torch.Generator().manual_seed(seed)
        tokens = generate(self.model, ids, max_tokens, temperature, generator, ends, self.tokenizer.vocab_size)
        return "".join(stream_text(tokens, self.tokenizer, ids))


def open_run(path: str | Path, device: str | torch.device | None = None) -> OpenRun:
    """Open the model of a run. Call it in the folder where the run was started, as paths in its config are relative.

    Args:
        path: a run's folder (its newest checkpoint), or a step-N folder.
        device: where the model lies; None: a GPU if there is one.

    Raises:
        UserError: there is no intact checkpoint, or the tokenizer cannot be read.
    """
    register(ARCHITECTURES)
    saved = open_saved_model(Path(path).expanduser())
    model = load_model(saved, torch.device(device) if device is not None else find_device().device)
    return OpenRun(model, tokenizer_of(saved.config), saved)
