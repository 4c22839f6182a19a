"""Weight samples: a few elements of every tensor of a model, a cheap way to detect writes to its weights.

PyTorch counts the writes to a tensor, but not those through `.data`, in inference mode, or by a custom kernel, which is
how trainers hand new weights to an engine. Only the bytes themselves cannot be bypassed. Elements are taken on a
lattice over the whole of each tensor, so that the sample shows an update, a merge or a shard of it:

    a tensor of [rows, columns], in the order of its memory, every `step` elements;
    `step` is some rows and 0.618 of another, so that neighbours in the sample share neither row nor column

An update of a share p of a tensor's elements goes undetected with a probability of (1 - p) ** 256 for that tensor. A
change to a few rows of a tensor, such as an embedding, can go undetected: its author has to declare it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import xxhash

ELEMENTS = 256
"""Least elements per tensor; a smaller tensor is taken whole."""
ELEMENTS_PER_EXPERT = 8
MAX_ELEMENTS = 8192
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Taken(NamedTuple):
    """A sample on its way to the host: read it with `digest`."""

    parts: list[torch.Tensor]
    copied: list[Any]
    """An event for each device that is still copying its part."""

    def digest(self) -> bytes:
        """The digest, 16 bytes. Waits for the copies, which wait for earlier work on their streams."""
        for event in self.copied:
            event.synchronize()
        digest = xxhash.xxh3_128()
        for part in self.parts:
            digest.update(part.numpy().data)
        return digest.digest()


def lattice(shape: Iterable[int]) -> tuple[int, int]:
    """The number of elements to take from a tensor of that shape, and their distance in memory."""
    sizes = list(shape)
    total = math.prod(sizes)
    wanted = ELEMENTS
    if len(sizes) > 2:  # stacked experts: an update of a single expert must be detected
        wanted = min(MAX_ELEMENTS, max(ELEMENTS, ELEMENTS_PER_EXPERT * sizes[0]))
    if total <= wanted:
        return total, 1
    step, row = total // wanted, sizes[-1]
    if step > row > 1:
        step = max(1, step // row - 1) * row + round(0.618 * row)
    while math.gcd(step, row) > 1:
        step -= 1
    return (total - 1) // step + 1, step


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold a tensor's bytes: itself, or the parts of a quantised or distributed one."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        yield tensor
        return
    for name in flatten()[0]:
        yield from plain_tensors(getattr(tensor, name))


def elements(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sampled elements of a tensor as integers, as a view if possible; None if it has no bytes."""
    if not tensor.numel():
        return None
    count, step = lattice(tensor.shape)
    kind = _INTEGERS.get(tensor.element_size())
    if kind is None:  # complex128
        tensor = torch.view_as_real(tensor)
        return elements(tensor)
    whole = (tensor.int_repr() if tensor.is_quantized else tensor.detach()).view(kind)
    dense = sum((size - 1) * stride for size, stride in zip(whole.shape, whole.stride(), strict=True)) + 1
    if dense == whole.numel():
        return whole.as_strided((count,), (step,))
    places = torch.arange(count, device=whole.device) * step
    return whole[torch.unravel_index(places, whole.shape)]


def _addresses(tensors: list[tuple[str, torch.Tensor]]) -> list[int]:
    """The addresses of all tensors' bytes, which change when a tensor gets other memory."""
    found = []
    for _, tensor in tensors:
        for plain in plain_tensors(tensor) if hasattr(tensor, "__tensor_flatten__") else (tensor,):
            try:
                found.append(plain.data_ptr())
            except RuntimeError:  # a sparse tensor has none
                found.append(id(plain))
    return found


class WeightSample:
    """Samples the same elements of a model's parameters and buffers repeatedly. For one thread.

    Args:
        keep_views: keep the sampled views between samples. Cheaper, but tensors that the model has dropped are
        freed only with the next sample: for engines that write to weights in place.

    Attributes:
        unread: tensors whose bytes cannot be read (on no device, or of a strange type), as of the last sample.
    """

    def __init__(self, *, keep_views: bool = False) -> None:
        self.unread: list[str] = []
        self._keep = keep_views
        self._seen: list[int] = []
        self._copies = False  # some elements are not a view of their tensor
        self._views: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def take(self, tensors: list[tuple[str, torch.Tensor]]) -> Taken:
        """Start to copy the elements of these tensors to the host. Waits for no device."""
        if self._keep:
            seen = _addresses(tensors)
            if seen != self._seen or self._copies:
                self._views, self._seen = self._views_of(tensors), seen
        views = self._views if self._keep else self._views_of(tensors)
        parts, events = [], []
        for group in views:
            part = torch.cat(group)
            if part.device.type == "cuda":
                host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                host.copy_(part, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(part.device))
                part = host
                events.append(event)
            parts.append(part.cpu())
        return Taken(parts, events)

    def _views_of(self, tensors: list[tuple[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
        """The elements of all tensors, joined if on the same device and of the same size."""
        self.unread, self._copies = [], False
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for name, tensor in tensors:
            try:
                for plain in plain_tensors(tensor):
                    if plain.device.type == "meta":
                        raise NotImplementedError("it has no bytes here")
                    view = elements(plain)
                    if view is not None:
                        self._copies |= view.data_ptr() != plain.data_ptr()
                        groups.setdefault((view.device, view.dtype), []).append(view)
            except (RuntimeError, NotImplementedError, TypeError):
                self.unread.append(name)
        return list(groups.values())
