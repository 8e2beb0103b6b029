"""`torchtitan-cp generate CHECKPOINT --prompt TEXT` goes on with a text, on one device, with a KV cache."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from models import ARCHITECTURES
from torchtitan_cp.attention import AttentionMask, Plan, attend, make_plan
from torchtitan_cp.checkpoint.weights import SavedModel, open_saved_model
from torchtitan_cp.config import UserError
from torchtitan_cp.config.sections import Rope
from torchtitan_cp.curriculum import rope_frequencies
from torchtitan_cp.data.corpus.cache import tokenizer_of
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.training.registry import architecture, register

# What a decoder gives for bytes that are no character yet.
UNFINISHED = "\ufffd"


class LayerCache:
    """Keys and values of one layer's tokens so far, `[B, s, Hkv, D]`; with a window, no more than it sees."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Put more tokens behind those that are here; all there are."""
        if self.k is not None and self.v is not None:
            k, v = torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)
        self.k, self.v = (k[:, -window:], v[:, -window:]) if window else (k, v)
        return k, v


def attend_cached(
    q: Tensor, k: Tensor, v: Tensor, caches: Iterator[LayerCache], window: int, sinks: Tensor | None = None
) -> Tensor:
    """What the model is handed: attention over a prompt, or of one token over all before it.

    Args:
        caches: of the layers, in the order they run.
    """
    cache = next(caches)
    begins = cache.k is None
    k, v = cache.add(k, v, window)
    if begins:
        return attend(q, k, v, _prompt_plan(q.shape[1], window), sinks=sinks)
    assert q.shape[1] == 1, "after the prompt tokens come one at a time"
    return _attend_last(q, k[:, -window:] if window else k, v[:, -window:] if window else v, sinks)


@lru_cache(maxsize=8)
def _prompt_plan(tokens: int, window: int) -> Plan:
    return make_plan(tokens, mask=AttentionMask(window=(window - 1, -1)) if window else None)


def _attend_last(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of the last token, `[B, 1, Hq, D]`, which sees every key; softmax in fp32."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * q.shape[-1] ** -0.5
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    shares = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhqk,bkhd->bqhd", shares.to(v.dtype), v)


def load_model(saved: SavedModel, device: torch.device) -> nn.Module:
    """The checkpoint's model on one device, in the run's compute dtype, with its last stage's rotary embedding."""
    kind = architecture(saved.config.model)
    shape = saved.model_args(type(next(iter(kind.flavors.values()))))
    with torch.device("meta"):
        model = kind.build(shape, attend_cached)
    names = [name for name, _ in model.named_parameters()]
    # A tied output is not in the list, and no tensor that is assigned stays tied.
    model.load_state_dict(saved.read(names), strict=False, assign=True)
    if shape.tie_embeddings:
        model.output.weight = model.tok_embeddings.weight  # type: ignore[union-attr]
    frequencies = rope_frequencies(saved.stage.rope or Rope(), shape.head_dim, saved.stage.seq_len)
    model.set_rope(*frequencies, device)  # type: ignore[operator]
    return model.to(device, getattr(torch, saved.config.training.compute_dtype)).eval()


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    eos_id: int = -1,
) -> Iterator[int]:
    """Tokens that go on with a prompt, one at a time.

    Args:
        model: built with `attend_cached`.
        prompt: token ids, one at least.
        max_tokens: how many at most.
        temperature: logits are divided by it before one is drawn; 0 takes the largest.
        generator: on the CPU.
        eos_id: ends it, and is not given.
    """
    caches = [LayerCache() for _ in model.layers]  # type: ignore[union-attr]
    device = next(model.parameters()).device
    tokens, start = list(prompt), 0
    for _ in range(max_tokens):
        positions = torch.arange(start, start + len(tokens), device=device)
        # Of the prompt, only the last token's logits are made.
        logits = model(torch.tensor([tokens], device=device), positions, iter(caches), _last_logits)
        start += len(tokens)
        token = _draw(logits.float().cpu(), temperature, generator)
        if token == eos_id:
            return
        yield token
        tokens = [token]


def _last_logits(hidden: Tensor, output: nn.Linear) -> Tensor:
    return output(hidden[0, -1])


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if not temperature:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer, prompt: Sequence[int]) -> Iterator[str]:
    """Text as it comes: what the tokens so far decode to beyond what was given, once its last character is whole."""
    ids = list(prompt)
    given = len(tokenizer.decode(ids))
    text = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith(UNFINISHED):
            yield text[given:]
            given = len(text)
    if text[given:]:
        yield text[given:]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan-cp generate", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a run's folder (its newest checkpoint), or a step-N folder")
    parser.add_argument("--prompt", required=True, help="text to go on with")
    parser.add_argument("--max-tokens", type=int, default=200, help="at most so many (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    options = parser.parse_args(arguments)
    register(ARCHITECTURES)
    try:
        saved = open_saved_model(options.checkpoint)
        tokenizer = tokenizer_of(saved.config.data, saved.config.tokenizer)
        model = load_model(saved, find_device().device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Without a word to go on with, the model begins a document, as it saw them: after the end of another.
    prompt = tokenizer.encode_batch([options.prompt])[0].tolist() or [tokenizer.eos_id]
    if len(prompt) + options.max_tokens > saved.stage.seq_len:
        print(f"note: longer than the {saved.stage.seq_len} tokens that {saved.path} was trained on", file=sys.stderr)
    generator = torch.Generator().manual_seed(options.seed)
    tokens = generate(model, prompt, options.max_tokens, options.temperature, generator, tokenizer.eos_id)
    print(options.prompt, end="", flush=True)
    for text in stream_text(tokens, tokenizer, prompt):
        print(text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
