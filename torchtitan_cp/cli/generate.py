"""`torchtitan-cp generate CHECKPOINT` continues a text (--prompt TEXT) or answers line by line (--chat).

On one device, with a cache of keys and values or of states.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from torchtitan_cp.attention import AttentionMask, attend, causal_conv, gated_delta_rule, make_plan, selective_scan
from torchtitan_cp.attention.kernels import reference
from torchtitan_cp.attention.kernels.kernel import ScoreMod
from torchtitan_cp.attention.linear.kernel import NORM_EPSILON
from torchtitan_cp.attention.mask import Band
from torchtitan_cp.checkpoint.weights import SavedModel, open_saved_model
from torchtitan_cp.cli.command import run_command
from torchtitan_cp.cli.options import at_least
from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import LanguageModel
from torchtitan_cp.data.corpus.tokenizer import Tokenizer
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.training.adapters import load_adapted
from torchtitan_cp.training.chat import chat_template_of, encode_turns, end_tokens
from torchtitan_cp.training.data_pipeline import tokenizer_of
from torchtitan_cp.training.model import cast_parameters, set_rope
from torchtitan_cp.training.plain_attention import delta_steps, scan_steps
from torchtitan_cp.training.registry import args_from, check_length, empty_model

UNFINISHED = "\ufffd"  # what bytes decode to before their character is complete
CONTEXT = 16  # tokens that are decoded with a new one, because a tokenizer may drop the space before a first token


# Keys and values of the tokens so far in one layer, `[B, s, Hkv, D]`; with a window, only those it sees. A layer
# without keys keeps what it carries from token to token. Empty at first.
KVCache = list[Tensor]


class CachedAttention:
    """The parts of a model that mix tokens: first over a whole prompt, then over one new token and all before it.

    Every call takes the next cache, in the order in which the layers run.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        caches: Iterator[KVCache],
        window: int,
        *,
        sinks: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attention; the other arguments as of `attend`."""
        cache = next(caches)
        if not cache:
            plan = make_plan(q.shape[1], mask=AttentionMask().windowed(window))
            out = attend(q, k, v, plan, scale=scale, sinks=sinks, softcap=softcap)
        else:
            assert q.shape[1] == 1, "after the prompt, tokens come one at a time"
            k, v = (torch.cat(pair, 1)[:, -window:] for pair in zip(cache, (k, v), strict=True))  # -0 keeps all
            scores = ScoreMod(scale or q.shape[-1] ** -0.5, softcap)
            out, lse = reference.forward(q, k, v, Band(None, None), scores)
            out = out if sinks is None else out * torch.sigmoid(lse - sinks.float())[..., None].to(out.dtype)
        cache[:] = k[:, -window:], v[:, -window:]
        return out

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        caches: Iterator[KVCache],
        *,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """Like `attention.causal_conv`; the cache holds the last W - 1 rows."""
        cache, new = next(caches), x.shape[1]
        x = torch.cat([*cache, x], 1)
        cache[:] = [x[:, max(0, x.shape[1] - weight.shape[1] + 1) :]]
        return causal_conv(x, weight, make_plan(x.shape[1]), bias, activation)[:, -new:]

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, caches: Iterator[KVCache], *, qk_l2norm: bool
    ) -> Tensor:
        """Like `attention.gated_delta_rule`, in fp32; the cache holds the state, `[B, Hv, K, V]`."""
        cache, dtype = next(caches), v.dtype
        q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
        if qk_l2norm:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON) for x in (q, k))
        _, tokens, _, key_dim = q.shape
        if cache:
            out, state = delta_steps(q, k, v, g.exp(), beta, cache[0])
        else:
            # After the prompt, one query for each row of the state reads it; zero keys and gates leave it unchanged.
            rows = torch.eye(key_dim, dtype=q.dtype, device=q.device)[None, :, None].expand(len(q), -1, q.shape[2], -1)
            k, v, g, beta = (torch.cat([x, x.new_zeros(len(x), key_dim, *x.shape[2:])], 1) for x in (k, v, g, beta))
            out = gated_delta_rule(torch.cat([q, rows], 1), k, v, g, beta, make_plan(tokens + key_dim))
            out, state = out[:, :tokens], out[:, tokens:].transpose(1, 2) * key_dim**0.5
        cache[:] = [state]
        return out.to(dtype)

    def selective_scan(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, caches: Iterator[KVCache]
    ) -> Tensor:
        """Like `attention.selective_scan`, in fp32; the cache holds the state, `[B, H, N, D]`."""
        cache, dtype, tokens, state_dim = next(caches), x.dtype, x.shape[1], B.shape[-1]
        x, dt, A, B, C = (y.float() for y in (x, dt, A, B, C))
        if cache:
            out, state = scan_steps(x, dt, (dt * A).exp(), B, C, cache[0])
        else:
            # As above; step sizes of 0 leave the state unchanged.
            rows = torch.eye(state_dim, device=x.device)[None, :, None].expand(len(C), -1, C.shape[2], -1)
            x, dt, B = (torch.cat([y, y.new_zeros(len(y), state_dim, *y.shape[2:])], 1) for y in (x, dt, B))
            out = selective_scan(x, dt, A, B, torch.cat([C, rows], 1), make_plan(tokens + state_dim))
            out, state = out[:, :tokens], out[:, tokens:].transpose(1, 2)
        cache[:] = [state]
        return out.to(dtype)

    def sum_ranks(self, x: Tensor, caches: Iterator[KVCache]) -> Tensor:
        """`x`: no ranks share the sequences."""
        return x

    def add_loss(self, hidden: Tensor, loss_sum: Tensor) -> Tensor:
        """`hidden`: nothing is differentiated."""
        return hidden


attend_cached = CachedAttention()


def new_caches(model: LanguageModel) -> list[KVCache]:
    """Empty caches, enough for every layer: attention uses one, a convolution and its recurrence two more."""
    return [KVCache() for _ in range(3 * len(model.layers))]


def load_model(saved: SavedModel, device: torch.device) -> LanguageModel:
    """The checkpoint's model on one device, in the run's compute dtype, with the rotary embedding of its last stage."""
    args = args_from(saved.config.model, saved.sizes)
    model = empty_model(saved.config.model, args, attend_cached)
    if saved.config.lora:
        load_adapted(model, saved, saved.config.lora)
    else:
        names = [name for name in model.state_dict() if name in saved.tensors]
        # A tied output is not among these names, and assigning unties it.
        model.load_state_dict(saved.read(names), strict=False, assign=True)
        if args.tie_embeddings:
            model.output.weight = cast(nn.Parameter, model.tok_embeddings.weight)
    cast_parameters(model.to(device), getattr(torch, saved.config.training.compute_dtype)).eval()
    set_rope(model, args, saved.stage.rope, saved.stage.seq_len, device)
    return model


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    end_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue a prompt.

    Args:
        model: built with `attend_cached`.
        prompt: token ids, at least one.
        max_tokens: yield at most so many.
        temperature: divides the logits; 0 takes the most likely token.
        generator: random numbers, on the CPU.
        end_ids: tokens that end the text; they are not yielded.
        vocab_size: ids from here on are not drawn: embeddings of a padded vocabulary, which are no tokens.
    """
    caches = new_caches(model)
    device = next(model.parameters()).device
    tokens, start = list(prompt), 0
    for _ in range(max_tokens):
        positions = torch.arange(start, start + len(tokens), device=device)
        logits = model(
            torch.tensor([tokens], device=device), positions, iter(caches), lambda hidden, output: output(hidden[0, -1])
        )
        start += len(tokens)
        token = sample_token(logits[:vocab_size].float().cpu(), temperature, generator)
        if token in end_ids:
            return
        yield token
        tokens = [token]


def sample_token(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """Draw a token from `[V]` logits; at temperature 0 the most likely one."""
    if not temperature:
        return int(logits.argmax())
    relative = (logits - logits.max()).double()  # at most 0, which no temperature makes infinite
    return int(torch.multinomial((relative / temperature).softmax(-1), 1, generator=generator))


def stream_text(tokens: Iterable[int], tokenizer: Tokenizer, prompt: Sequence[int]) -> Iterator[str]:
    """Yield the text of the tokens as they come, in whole characters."""
    ids = prompt[-CONTEXT:]
    text = tokenizer.decode(ids)
    yielded = len(text)
    for token in tokens:
        ids = [*ids, token]
        text = tokenizer.decode(ids)
        if not text.endswith(UNFINISHED):
            yield text[yielded:]
            ids = ids[-CONTEXT:]
            text = tokenizer.decode(ids)
            yielded = len(text)
    if text[yielded:]:
        yield text[yielded:]


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of a text to continue. An empty one begins a document, as in training: after the end of another."""
    return [*tokenizer.bos_ids, *tokenizer.encode_batch([text])[0].tolist()] or [tokenizer.eos_id]


def user_lines() -> Iterator[str]:
    """Yield the lines of standard input; on a terminal with a prompt sign.

    Raises:
        ConfigError: a line is not UTF-8.
    """
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
            line.encode()  # in some locales other bytes come as half surrogate pairs
        except EOFError:
            return
        except UnicodeError as error:
            raise ConfigError(f"a line of standard input is not UTF-8: {error}", fix="convert it to UTF-8") from None
        yield line


def print_stream(texts: Iterable[str]) -> str:
    """Print pieces of text as they come, then a line break. Returns the whole text."""
    line = ""
    for text in texts:
        print(text, end="", flush=True)
        line += text
    print()
    return line


def chat(lines: Iterable[str], answer: Callable[[list[dict[str, str]]], str], system: str = "") -> None:
    """Print an answer to each line. Each answer encodes the whole conversation, as some templates shorten older turns.

    Args:
        lines: what the user types. `/quit` ends the conversation, `/file PATH` puts a file's text before the next line.
        answer: prints and returns what follows the messages.
        system: the first message, if there is one.
    """
    messages, before = [{"role": "system", "content": system}] if system else [], ""
    for line in map(str.strip, lines):
        if line == "/quit":
            return
        if line.startswith("/file "):
            try:
                before += Path(line.removeprefix("/file ").strip()).expanduser().read_text(encoding="utf-8") + "\n\n"
            except (OSError, UnicodeDecodeError) as error:
                print(f"not read: {error}", file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": before + line})
            messages.append({"role": "assistant", "content": answer(messages)})
            before = ""


def utf8_text(argument: str) -> str:
    """The argument; argparse refuses it by the error that bytes which are not UTF-8 raise here."""
    argument.encode()
    return argument


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan-cp generate", description=__doc__)
    parser.add_argument(
        "checkpoint", type=Path, help="a run's folder or its checkpoints/ (the newest one), or a step-N folder"
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--prompt", type=utf8_text, help="text to continue; - reads standard input, which may be longer")
    task.add_argument(
        "--chat",
        action="store_true",
        help="answer each line of standard input; /file PATH puts a file before the next line, /quit ends",
    )
    parser.add_argument("--system", type=utf8_text, default="", help="with --chat: the system's message")
    parser.add_argument(
        "--max-tokens", type=at_least(0), default=200, help="how many to generate at most (default 200)"
    )
    parser.add_argument("--temperature", type=at_least(0, float), default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the random numbers (default 0)")
    options = parser.parse_args(arguments)
    if options.system and not options.chat:
        parser.error("--system needs --chat")
    return run_command(lambda: _generate(options))


def _generate(options: argparse.Namespace) -> int:
    """Print the prompt and what continues it, or answers. Returns the exit code."""
    saved = open_saved_model(options.checkpoint)
    args = args_from(saved.config.model, saved.sizes)
    tokenizer = tokenizer_of(saved.config)
    template = chat_template_of(saved.config) if options.chat else None
    if options.chat and not template:
        raise ConfigError(
            f"{saved.path} has no chat template: neither its data nor its tokenizer names one",
            fix="continue a text with --prompt, or train on conversations",
        )
    ends = end_tokens(template, tokenizer) if template else {tokenizer.eos_id}
    model = load_model(saved, find_device().device)
    generator = torch.Generator().manual_seed(options.seed)

    def continue_text(prompt: list[int], text: str = "") -> str:
        check_length(args, "the prompt", len(prompt))
        # The last token takes no position.
        most = min(options.max_tokens, args.longest + 1 - len(prompt)) if args.longest else options.max_tokens
        if len(prompt) + options.max_tokens > saved.stage.seq_len:
            cut = f", and cut at its {args.longest} learned positions" if most < options.max_tokens else ""
            print(f"{saved.length_note}{cut}", file=sys.stderr)
        tokens = generate(model, prompt, most, options.temperature, generator, ends, tokenizer.vocab_size)
        return print_stream(chain([text], stream_text(tokens, tokenizer, prompt)))

    if template:
        chat(user_lines(), lambda turns: continue_text(encode_turns(template, tokenizer, turns)), options.system)
    else:
        text = "\n".join(user_lines()) if options.prompt == "-" else options.prompt
        continue_text(encode_prompt(tokenizer, text), text)
    return 0
