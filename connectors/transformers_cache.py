"""Prefix cache for `model.generate` of Hugging Face transformers: restores stored KV before the prefill.

    from .transformers_cache import PrefixCache

    with PrefixCache(model) as cache:
        output = cache.generate(**inputs, max_new_tokens=64)

`generate` restores the longest stored prefix of the prompt, has transformers compute the rest, and stores the new
tokens, prompt and answer alike. Without a daemon, and for a call that it cannot serve (beams, drafts, images), it is
`model.generate` and nothing else. Which calls it serves is decided by what transformers makes of their arguments:
`transformers.calls`.

It serves decoders whose cache is K and V per layer (`DynamicCache`), of transformers 5. They are tried at the start: a
model that computes something else from a restored prefix than from the whole prompt is refused. Layers with a sliding
window are kept whole here, because the next prompt needs what they would drop; a model whose masks do not make the
window is refused. A block is
`layer, K then V, kv_head, slot, head_dim`; it goes through a staging buffer, because transformers' own tensors grow and
move.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import DynamicCache

from tiercache.connector.connector import Connector, connect
from tiercache.connector.loads import Match
from tiercache.connectors.transformers.model import (
    check_version,
    make_namespace,
    try_generate,
    try_model,
)
from tiercache.connectors.transformers.watch import ModelWatch
from tiercache.copies.pool import Pool
from tiercache.errors import ConfigError, ModelRefused
from tiercache.ground.units import parse_bytes
from tiercache.protocol.hints import Hint
from tiercache.protocol.keys import KeyChain, name_blocks
from tiercache.protocol.messages import ModelCard

from .transformers import calls

MAX_SAID = 100
"""Lines of one cache in the log, each once. The text of an error may be another one each time."""

logger = logging.getLogger("tiercache.connectors.transformers")


class RestoredCache(DynamicCache):  # type: ignore[misc]
    """transformers' own cache, with the origin of its content.

    Attributes:
        root: identifies what computes it.
        changes: see `ModelWatch`, when that was asked.
        known_tokens: how many leading ones were restored.
        named_tokens: how many of these need no store. The daemon does not know what blocks from a shared store are
            called: where it publishes KV events, a store names them, which writes nothing as long as they are there.
    """

    root = b""
    changes = 0
    known_tokens = 0
    named_tokens = 0


class PrefixCache:
    """The cache in front of one model. Thread-safe as far as the model is. Close it when done.

    Attributes:
        connector: the connector underneath; its counters and statistics.
        bypassed: calls that went to `model.generate` alone, for a reason that was logged once.
    """

    def __init__(
        self,
        model: Any,
        address: str | Path | None = None,
        *,
        block_size: int = 16,
        salt: str = "",
        model_id: str = "",
        staging: str | int = "64MiB",
        required: bool = False,
        **options: Any,
    ) -> None:
        """Try the model, name its weights, and connect.

        Args:
            model: a decoder of transformers, in memory, on the CPU or on CUDA.
            address: the daemon's run directory; by default the default one.
            block_size: tokens in a block.
            salt: secret of a tenant; chains of different salts never meet.
            model_id: identifies the weights (a hash, a revision), and code that is not PyTorch's or transformers':
                adapters, hooks, classes of your own. By default every byte of the weights is hashed, at memory speed,
                and again when they change, and a model with such code is refused.
            staging: size of the buffer between the tensors of the model and the cache.
            required: raise DaemonUnavailable where no daemon answers.
            **options: further arguments of `tiercache.connect`.

        Raises:
            ModelRefused: the model, or this version of transformers, cannot be served; the text says why.
            ConfigError: invalid block_size or staging.
        """
        check_version(transformers.__version__)
        self._model = model
        self.bypassed = 0
        self._shapes, dtype = try_model(model)
        self._padded = try_generate(model)  # else rows with padding bypass the cache
        self._block_size = block_size
        self._lock = threading.RLock()  # of the staging buffer; a signal handler may run in the thread that has it
        self._is_busy = False  # what the thread that has the lock says
        self._said: set[str] = set()
        spec = make_namespace(self._shapes, dtype, block_size)
        blocks = parse_bytes(staging) // spec.block_bytes
        if blocks < 1:
            raise ConfigError(f"staging is {staging}: must hold a block, {spec.block_bytes} bytes")
        with torch.inference_mode(False):  # calls in and outside of that mode write to it
            self._staging = torch.empty(blocks, spec.block_bytes // dtype.itemsize, dtype=dtype, device=model.device)
        self.watch = ModelWatch(model, model_id, salt)
        pool = Pool.from_blocks(self._staging)
        self.connector: Connector = connect(address, namespace=spec, pool=pool, required=required, **options)
        self._announce()
        self.watch.on_change = self._announce
        self.watch.try_again = self._try_again

    @property
    def model(self) -> Any:
        """The model. Another one needs a cache of its own: this one was named and tried."""
        return self._model

    def close(self) -> None:
        """Close the connection to the daemon. Blocks for seconds at most."""
        self.connector.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def weights_changed(self, model_id: str = "") -> None:
        """Declare that the model computes something else from here on; `model_id` names it again.

        Without `model_id` no other process shares this model's blocks from here on: the change may be invisible to
        everything that a name is made of.

        Not needed for updates, merges and other weights: those are noticed. A change to some rows of one tensor through
        `.data`, as to those of a few tokens in an embedding, may not be. Changes inside of objects and functions that
        `model_id` stands for are not.
        """
        self.watch.weights_changed(model_id)

    def generate(self, *arguments: Any, hint: Hint | None = None, **options: Any) -> Any:
        """`model.generate` with the same arguments and the same result; `hint` as for `store`.

        A second positional tensor is the attention_mask.

        Raises only what `model.generate` raises: a cache that fails is a miss.
        """
        ids, *more = arguments or (None,)
        if len(more) == 1 and isinstance(more[0], torch.Tensor):
            arguments, options = (ids,), {**options, "attention_mask": more[0]}
        if not self.connector.available:
            return self.model.generate(*arguments, **options)

        def restore(ids: torch.Tensor, mask: torch.Tensor | None) -> RestoredCache:
            try:
                root = self.watch.root()
                if calls.has_padding(mask) and not self._padded:
                    raise calls.Unserved("it has padding, behind which this model computes something else")
                return self._restore(root, ids, mask)
            except (ModelRefused, calls.Unserved) as error:
                raise calls.Unserved(str(error)) from None
            except Exception as error:
                logger.debug("restoring failed", exc_info=True)
                raise calls.Unserved(_failure("a stored prefix cannot be restored", error)) from error

        def done(cache: DynamicCache, tokens: torch.Tensor, mask: torch.Tensor | None) -> None:
            assert isinstance(cache, RestoredCache)
            try:
                self._store(cache, tokens, mask, hint)
            except Exception as error:  # the answer is there
                logger.debug("storing failed", exc_info=True)
                self._say_unstored(_failure("storing failed", error))

        try:
            return calls.generate(self.model, arguments, options, restore, done)
        except calls.Unserved as error:
            self._bypass(str(error))
        return self.model.generate(*arguments, **options)

    def restore(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> RestoredCache:
        """The stored part of a prompt, as a cache to pass to the model's own `generate` or `forward`; empty for a miss.

        Preconditions (guaranteed by the caller): the model computes the rest of the prompt from its token ids alone,
        each at its place in the prompt. It gets no embeddings, pixels, `token_type_ids`, positions of other places, or
        masks of four dimensions.

        Args:
            input_ids: [row, token], without padding.
            attention_mask: [row, token]; nothing is restored under one with a 0. `generate` gives the tokens behind
                padding the places that they have without it, and a plain `forward` does not.

        At least the last token is left to be computed.
        """
        reason = calls.unserved_by_hand(input_ids, attention_mask)
        try:
            if not reason:
                return self._restore(self.watch.root(), input_ids, attention_mask)
        except ModelRefused as error:
            reason = str(error)
        self._bypass(reason)
        return RestoredCache()

    @torch.no_grad()
    def _restore(self, root: bytes, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> RestoredCache:
        cache = RestoredCache()
        cache.root, cache.changes = root, self.watch.changes
        length = input_ids.shape[1]
        if length > self.watch.limit or not self.connector.available:
            return cache
        end_s = time.monotonic() + self.connector.load_timeout_s
        with self._alone(end_s) as alone:
            if not alone:
                return cache
            rows = self._rows(cache.root, input_ids[:, :-1], attention_mask)
            matches = self._match(rows, end_s)
            if not matches:
                return cache
            kept = min(row.pad + match.blocks * self._block_size for row, match in zip(rows, matches, strict=True))
            kept = min(kept, length - 1)
            named = kept
            if self.connector.wants_events:
                ours = (match.blocks - match.shared_blocks for match in matches)
                named = min(row.pad + blocks * self._block_size for row, blocks in zip(rows, ours, strict=True))
            states = self._new_states(len(rows), kept)
            for index, (row, match) in enumerate(zip(rows, matches, strict=True)):
                kept = min(kept, self._load_row(row, match, states, index, kept, end_s))
        for layer in range(len(self._shapes) if kept else 0):
            keys, values = states[2 * layer : 2 * layer + 2]
            cache.update(keys[:, :, :kept], values[:, :, :kept], layer)
        cache.known_tokens, cache.named_tokens = kept, min(kept, named)
        return cache

    def _match(self, rows: list[_Row], end_s: float) -> list[Match]:
        """What is stored of each row; nothing where that restores nothing, or was not known by `end_s`."""
        matches = list[Match]()
        for row in rows:
            matches.append(self.connector.match(row.chain.packed()))
            if not (row.pad or matches[-1].blocks) or time.monotonic() > end_s:
                break
        if len(matches) == len(rows) and any(match.blocks for match in matches):
            return matches
        for match in matches:
            self.connector.release(match)
        return []

    def store(
        self,
        cache: RestoredCache,
        tokens: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        hint: Hint | None = None,
    ) -> int:
        """Store the new part of a cache that holds the K and V of `tokens`; returns how many blocks were stored.

        Preconditions (guaranteed by the caller): those of `restore`, for all calls that have filled the cache.

        Args:
            cache: what `restore` returned, after `generate` or `forward` has filled it.
            tokens: [row, token], at least as many as the cache holds, without padding.
            attention_mask: that of the prompt; nothing is stored under one with a 0.
            hint: what is known of the further use of these tokens.

        Blocks until the copies have ended. A failure is 0.
        """
        if reason := calls.unserved_by_hand(tokens, attention_mask):
            self._say_unstored(reason)
            return 0
        return self._store(cache, tokens, attention_mask, hint)

    @torch.no_grad()
    def _store(
        self, cache: RestoredCache, tokens: torch.Tensor, attention_mask: torch.Tensor | None, hint: Hint | None
    ) -> int:
        """As `store`, behind padding too: `generate` computes the same there as without."""
        length = int(cache.get_seq_length())
        if length > tokens.shape[1]:
            self._say_unstored("its cache holds more tokens than it has")
            return 0
        if length > self.watch.limit or not self.connector.available:
            return 0
        try:
            if (self.watch.root(), self.watch.changes) != (cache.root, cache.changes):
                # computed, in part at least, by weights that are gone, if they are not back by now
                self._say_unstored("what the model computes has changed since it began")
                return 0
        except ModelRefused as error:
            self._say_unstored(str(error))
            return 0
        end_s = time.monotonic() + self.connector.load_timeout_s
        with self._alone(end_s) as alone:
            if not alone:
                return 0
            rows, stored = self._rows(cache.root, tokens[:, :length], attention_mask), 0
            for index, row in enumerate(rows):
                stored += self._store_row(row, cache, index, end_s)
        if hint is not None:
            for row in rows:
                if self._is_late(end_s):
                    break
                self.connector.hint(row.chain.packed(), hint)
        return stored

    def _is_late(self, end_s: float) -> bool:
        """True, which is said, if nothing more of a call may be stored."""
        late = time.monotonic() > end_s
        if late:
            self._say_unstored(f"the daemon takes longer than load_timeout_s, {self.connector.load_timeout_s:g} s")
        return late

    @contextmanager
    def _alone(self, end_s: float) -> Iterator[bool]:
        """Have the staging buffer alone; False if others have it until `end_s`, or in a signal handler of its user."""
        left_s = min(max(0.0, end_s - time.monotonic()), threading.TIMEOUT_MAX)
        if not self._lock.acquire(timeout=left_s):
            what = "the staging buffer is in use by calls of other threads for longer than load_timeout_s"
            self._say(f"{what}, which is a miss: give each thread a PrefixCache of its own")
            yield False
            return
        try:
            if self._is_busy:
                yield False
                return
            self._is_busy = True
            try:
                yield True
            finally:
                self._is_busy = False
        finally:
            self._lock.release()

    # --- one row ---------------------------------------------------------------------------------

    def _rows(self, root: bytes, tokens: torch.Tensor, attention_mask: torch.Tensor | None) -> list[_Row]:
        pads = [0] * tokens.shape[0] if attention_mask is None else (attention_mask == 0).sum(-1).tolist()
        return [
            _Row(pad, KeyChain(root, self._block_size, row[pad:]), row[pad:])
            for pad, row in zip(pads, tokens.cpu().numpy(), strict=True)
        ]

    def _new_states(self, rows: int, tokens: int) -> list[torch.Tensor]:
        """K and V of each layer, [row, kv_head, token, head_dim]; zeros, because padding must be finite."""
        return [
            torch.zeros(rows, shape.kv_heads, tokens, dim, dtype=self._staging.dtype, device=shape.device)
            for shape in self._shapes
            for dim in (shape.k_dim, shape.v_dim)
        ]

    def _load_row(self, row: _Row, match: Match, states: list[torch.Tensor], index: int, end: int, end_s: float) -> int:
        """Load blocks of the row at `index` into tokens `row.pad ..< end`; returns up to which token they are good.

        In pieces of the staging buffer, each under a match of its own; none begins after `end_s`.
        """
        size, good = self._block_size, 0
        count = max(0, -(-(end - row.pad) // size))
        while good < count and (left_s := end_s - time.monotonic()) > 0:
            match = match if good == 0 else self.connector.match(row.chain.packed(count))
            ids = range(min(count - good, len(self._staging)))
            loaded = self.connector.load(match, ids, first=good, timeout_s=left_s)
            if not loaded:
                break
            begin = row.pad + good * size
            stop = min(begin + loaded * size, end)
            for piece, state in zip(self._pieces(loaded), states, strict=True):
                tokens = piece.transpose(0, 1).flatten(1, 2)
                state[index, :, begin:stop] = tokens[:, : stop - begin].to(state.device)
            good += loaded
        self.connector.release(match)
        return min(end, row.pad + good * size)

    def _store_row(self, row: _Row, cache: RestoredCache, index: int, end_s: float) -> int:
        """Store the new blocks of the row at `index`, in pieces of the staging buffer; none begins after `end_s`."""
        size, count, stored = self._block_size, len(row.chain), 0
        done = min(count, max(0, cache.named_tokens - row.pad) // size)
        begun_anew = False
        while done < count and not self._is_late(end_s):
            part = min(count - done, len(self._staging))
            begin = row.pad + done * size
            states = (state for layer in cache.layers for state in (layer.keys, layer.values))
            for piece, state in zip(self._pieces(part), states, strict=True):
                tokens = state[index, :, begin : begin + part * size]
                piece.copy_(tokens.reshape(tokens.shape[0], part, size, -1).transpose(0, 1))
            keys, events = row.chain.packed(done + part), None
            if self.connector.wants_events:
                events = name_blocks(keys, done, row.tokens[done * size : (done + part) * size])
            result = self.connector.store(keys, range(part), first=done, events=events)
            stored += result.stored
            if result.parent_missing and not begun_anew:
                begun_anew, done = True, 0  # restored blocks have been evicted since
            elif result.dropped:
                break
            else:
                done += part
        return stored

    def _pieces(self, blocks: int) -> list[torch.Tensor]:
        """The K and V of each layer in the first blocks of the staging buffer, [block, kv_head, slot, head_dim]."""
        pieces, begin = [], 0
        for heads, k_dim, v_dim, _ in self._shapes:
            for dim in (k_dim, v_dim):
                length = heads * self._block_size * dim
                part = self._staging[:blocks, begin : begin + length]
                pieces.append(part.view(blocks, heads, self._block_size, dim))
                begin += length
        return pieces

    # --- the model ---------------------------------------------------------------------------------

    def _try_again(self) -> None:
        """Try the model as at the start. Raises ModelRefused."""
        if try_model(self.model) != (self._shapes, self._staging.dtype):
            raise ModelRefused("its K and V have another shape or type now, or are elsewhere: make a new cache")
        # Never from False to True: the last trial may have been of another state than the one that is served.
        self._padded = try_generate(self.model) and self._padded

    # --- what is said of it ------------------------------------------------------------------------

    def _bypass(self, reason: str) -> None:
        self.bypassed += 1
        self._say(f"a call goes without the cache: {reason}")

    def _say_unstored(self, reason: str) -> None:
        self._say(f"what a call has computed is not stored, or not all of it: {reason}")

    def _say(self, what: str) -> None:
        if what not in self._said and len(self._said) < MAX_SAID:
            self._said.add(what)
            logger.warning("%s", what)

    def _announce(self) -> None:
        """Announce the model, for the affinity query."""
        path = str(self.model.config._name_or_path)
        names = list(dict.fromkeys(filter(None, [Path(path).name, path, type(self.model).__name__])))
        namespaces = [self.connector.namespace.fingerprint()]
        self.connector.announce([ModelCard(names, self.watch.content, namespaces, self._block_size)])


def _failure(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {error}".splitlines()[0]


class _Row(NamedTuple):
    """One row of a batch: its number of leading padding tokens, and the others with their keys."""

    pad: int
    chain: KeyChain
    tokens: Any
