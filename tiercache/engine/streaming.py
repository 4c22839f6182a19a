"""Attention sinks and a window in models trained with full attention, for endless chats.

A model's output degrades when it no longer sees the first tokens, even if they mean little: surplus attention goes
there. So they stay visible, beside a window (Xiao, Tian, Chen, Han and Lewis, Efficient Streaming Language Models with
Attention Sinks, 2023). As in that paper, positions are those in the cache: with S sinks and a window of W, token p sees
the sinks as if it were at S + W - 1, and never at a distance beyond the trained ones.

The pool holds keys as the model rotated them, by their absolute positions. Only differences count, and those within the
window are right. So keys stay as they are, and a query is rotated back for the sinks, by `p - (S + W - 1)`. The
rotation of a layer is found by experiment: the model is run at two positions, and the queries compared.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_EXACT_POSITIONS = 1 << 18
"""Radians at which a float32 angle is off by a hundredth: no more than bfloat16 loses."""


class Rotation(NamedTuple):
    """Rotary positions of a layer: the first `2 * len(frequencies)` elements of a head, in two halves, are turned.

    `frequencies` are float64 `[pair]`, radians per position (Su et al., RoFormer, 2021).
    """

    frequencies: torch.Tensor

    def turn(self, query: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
        """`query` `[..., token, head_dim]` as if each token were `distance` `[..., token]` further on."""
        angles = distance.double()[..., None] * self.frequencies
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        half = len(self.frequencies)
        first, second, rest = query[..., :half], query[..., half : 2 * half], query[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class Streaming(NamedTuple):
    """How layers without a window of their own attend, instead of seeing everything.

    `rotations` has one entry per layer.
    """

    window: int
    sinks: int
    rotations: dict[int, Rotation]

    def query_for_sinks(self, layer: int, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Queries rotated for the sinks.

        `[sequence, head, token, head_dim]`, of tokens at `positions` `[sequence, token]`.
        """
        back = (positions - (self.sinks + self.window - 1)).clamp(min=0)
        return self.rotations[layer].turn(query, -back[:, None])


def longest_sequence(context: int) -> int:
    """The most tokens of a sequence in which no token sees further than `context`."""
    return max(context, _EXACT_POSITIONS)
