"""Sizes of Qwen3.5 by name: gated delta nets, and full attention in one layer of four.

Source: the config.json of each released checkpoint (text_config), Qwen team, 2026; 3.6 has the same block.
"""

from dataclasses import dataclass
from functools import cached_property, partial

from models.architecture import Mixer
from models.llama.flavors import LlamaArgs


@dataclass(frozen=True)
class HybridArgs(LlamaArgs):
    """Sizes of a hybrid; n_heads, n_kv_heads and head_dim are those of its layers of full attention.

    Attributes:
        linear_key_heads: Hk, heads of queries and keys in the gated delta rule.
        linear_value_heads: Hv, its heads of values; a multiple of Hk.
        linear_key_dim, linear_value_dim: K and V, their dims.
        conv_width: W, positions that the convolution before it sees.
        attention_every: in every group of so many layers, the last has full attention.
        rotary_share: the part of a head that RoPE rotates.
    """

    linear_key_heads: int = 16
    linear_value_heads: int = 32
    linear_key_dim: int = 128
    linear_value_dim: int = 128
    conv_width: int = 4
    attention_every: int = 4
    rotary_share: float = 0.25

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """Whether each layer has a gated delta net."""
        return tuple((number + 1) % self.attention_every > 0 for number in range(self.n_layers))

    @property
    def rotary_dim(self) -> int:
        """See LlamaArgs."""
        return int(self.head_dim * self.rotary_share)

    @property
    def _channels(self) -> tuple[int, int]:
        """Channels of q, k and v together, and of v alone, in a gated delta net."""
        values = self.linear_value_heads * self.linear_value_dim
        return 2 * self.linear_key_heads * self.linear_key_dim + values, values

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The recurrence or the attention of each layer; a state is Hv K V."""
        channels, values = self._channels
        attention = Mixer(self.n_heads, self.n_kv_heads, self.head_dim, self.head_dim)
        delta_net = Mixer(0, 0, 0, 0, 0, False, values * self.linear_key_dim, channels, values, self.linear_value_heads)
        return tuple(delta_net if linear else attention for linear in self.linear_layers)

    def linear_parameters(self) -> int:
        """See LlamaArgs."""
        channels, values = self._channels
        delta_net = self.dim * (channels + 2 * values + 2 * self.linear_value_heads) + self.conv_width * channels
        attention = self.dim * self.head_dim * (3 * self.n_heads + 2 * self.n_kv_heads)
        mixers = sum(delta_net if linear else attention for linear in self.linear_layers)
        return mixers + self.n_layers * 3 * self.dim * self.ffn_dim + self.dim * self.vocab_size

    def problem(self) -> str | None:
        """Why these sizes are not a valid model, or None."""
        linear = (self.linear_key_heads, self.linear_value_heads, self.linear_key_dim, self.linear_value_dim)
        if min(*linear, self.conv_width, self.attention_every) < 1:
            return "every size of the gated delta net must be at least 1"
        if self.linear_value_heads % self.linear_key_heads:
            return f"linear_value_heads = {self.linear_value_heads} is not a multiple of {self.linear_key_heads}"
        if self.n_layers < self.attention_every:
            return f"n_layers = {self.n_layers} leaves no layer of full attention (attention_every)"
        if not 0 < self.rotary_share <= 1 or self.rotary_dim % 2 or not self.rotary_dim:
            return f"rotary_share = {self.rotary_share} of head_dim = {self.head_dim} is no even number of entries"
        if any(self.windows) or self.qkv_bias or self.sinks or not self.qk_norm:
            return "its attention has qk_norm, and no windows, biases or sinks"
        return super().problem()


_debug = partial(HybridArgs, linear_key_heads=3, linear_value_heads=6, linear_key_dim=32, linear_value_dim=32)
_released = partial(HybridArgs, vocab_size=248320, norm_eps=1e-6, qk_norm=True)
# E, layers, Hq, Hkv, D, SwiGLU.
FLAVORS = {
    "debug": _debug(192, 4, 6, 2, 32, 512, tie_embeddings=True, qk_norm=True, rotary_share=0.5),
    "0.8B": _released(1024, 24, 8, 2, 256, 3584, tie_embeddings=True, linear_value_heads=16),
    "2B": _released(2048, 24, 8, 2, 256, 6144, tie_embeddings=True, linear_value_heads=16),
    "4B": _released(2560, 32, 16, 4, 256, 9216, tie_embeddings=True, linear_value_heads=32),
    "9B": _released(4096, 32, 16, 4, 256, 12288, linear_value_heads=32),
    "27B": _released(5120, 64, 24, 4, 256, 17408, linear_value_heads=48),
}
