"""Hot prefixes: the most used paths of the prefix tree, in little memory.

A match ends at some block; the chain up to there is a *path*. Paths are counted where they end. When there are too
many, the rarest add their count to the node where they branch off, so that a thousand conversations below one system
prompt become one path, that prompt, with a thousand hits (hierarchical heavy hitters, after Cormode, Korn,
Muthukrishnan and Srivastava, VLDB 2003). Hits are halved every ten minutes, so last week's hot paths do not stay hot
forever.

A key is all one needs to ask the cache, so keys are never shown: a path is named by the first four bytes of its last
key, enough to tell paths apart. Tokens and KV never come here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from tiercache.protocol.messages import KEY_BYTES

if TYPE_CHECKING:
    from tiercache.daemon.index.index import Index
    from tiercache.daemon.tiers.dram.space import Namespace

MAX_PATHS = 256
KEPT_PATHS = 64
"""Paths that stay whole when there are more than `MAX_PATHS`."""
MAX_DEPTH = 1024
"""Blocks of a path; deeper matches are counted at this depth. With `MAX_PATHS` that is 4 MiB at most."""
MAX_SHOWN = 64
HALF_LIFE_S = 600.0
CUT_EVERY_S = 30.0
"""When paths become too many sooner than this, only some of the matches are counted, each for more."""
QUIET_S = 120.0
MAX_STRIDE = 1024
NAME_BYTES = 4


class _Path:
    __slots__ = ("hits", "keys", "namespace")

    def __init__(self, namespace: Namespace, keys: bytes) -> None:
        self.namespace = namespace
        self.keys = keys
        self.hits = 0.0


class _Node:
    """A node of the tree, `depth` blocks below the root on `path`, and the hits of all paths through it."""

    __slots__ = ("depth", "hits", "parent", "path")

    def __init__(self, path: _Path, depth: int, hits: float) -> None:
        self.path = path
        self.depth = depth
        self.hits = hits
        self.parent: _Node | None = None


class HotPaths:
    """Counts where matches end. Event loop only; `matched` is O(1), but now and then takes about a millisecond."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._paths: dict[tuple[int, bytes], _Path] = {}
        self._random = Random(0)
        self._stride = 1  # one match of this number is counted, for all of them
        self._skip = 0
        self._cut_s = self._halved_s = clock_s()

    def matched(self, namespace: Namespace, keys: bytes, blocks: int) -> None:
        """The first `blocks` (at least one) of `keys` were found."""
        if self._skip:
            self._skip -= 1
            return
        self._age()
        if self._stride > 1:
            self._skip = self._random.randrange(2 * self._stride - 1)
        self._add(namespace, keys[: min(blocks, MAX_DEPTH) * KEY_BYTES], self._stride)
        if len(self._paths) > MAX_PATHS:
            self._cut()

    def _add(self, namespace: Namespace, keys: bytes, hits: float) -> None:
        name = namespace.number, keys[-KEY_BYTES:]
        path = self._paths.get(name)
        if path is None:
            path = self._paths[name] = _Path(namespace, keys)
        path.hits += hits

    def _cut(self) -> None:
        """Keep the best paths whole; the others' hits move up to where they branch off their neighbours."""
        now_s = self._clock_s()
        if now_s - self._cut_s < CUT_EVERY_S:
            self._stride = min(2 * self._stride, MAX_STRIDE)
        self._cut_s = now_s
        rows, shared = self._sorted()
        least = sorted((path.hits for path in rows), reverse=True)[KEPT_PATHS - 1]
        self._paths = {(path.namespace.number, path.keys[-KEY_BYTES:]): path for path in rows if path.hits > least}
        for number, path in enumerate(rows):
            depth = max(shared[number], shared[number + 1])
            if path.hits <= least and depth:
                self._add(path.namespace, path.keys[: depth * KEY_BYTES], path.hits)
        if len(self._paths) > MAX_PATHS // 2:
            best = sorted(self._paths.items(), key=lambda item: -item[1].hits)
            self._paths = dict(best[: MAX_PATHS // 2])

    def _age(self) -> None:
        """Halve old hits, and count more of the matches if there has long been room for them."""
        now_s = self._clock_s()
        if now_s - self._cut_s > QUIET_S:
            self._stride = max(1, self._stride // 2)
            self._cut_s = now_s
        periods = int((now_s - self._halved_s) / HALF_LIFE_S)
        if periods:
            self._halved_s += periods * HALF_LIFE_S
            for path in self._paths.values():
                path.hits *= 0.5 ** min(periods, 64)
            self._paths = {name: path for name, path in self._paths.items() if path.hits >= 0.5}

    def _sorted(self) -> tuple[list[_Path], list[int]]:
        """All paths in an order in which neighbours share most, and how many blocks each shares with the one before.

        The second list has one more item: the last path shares nothing with what would follow.
        """
        rows = sorted(self._paths.values(), key=lambda path: (path.namespace.number, path.keys))
        between = [_shared_blocks(before, after) for before, after in pairwise(rows)]
        return rows, [0, *between, 0] if rows else [0]

    def snapshot(self, limit: int, index: Index) -> list[dict[str, Any]]:
        """The hottest nodes of the trees, parents before children; `parent` is an index into this list.

        Half of the list is for roots, so that the branches of one prompt do not hide all other prompts.
        `hits` pass through the node, `blocks` lead from the root to it, and `dram_blocks` of those are in DRAM now.
        """
        self._age()
        nodes = _tree(*self._sorted())
        # No node has more hits than its parent, and of equals the shallower one comes first: so parents come first.
        ranked = sorted(nodes, key=lambda node: (-node.hits, node.depth))
        best = _fair(ranked, min(limit, MAX_SHOWN))
        places = {id(node): place for place, node in enumerate(best)}
        return [_shown(node, places, index) for node in best]


def _shared_blocks(one: _Path, other: _Path) -> int:
    """How many leading blocks two paths share. A key names all before it, so a binary search works."""
    if one.namespace is not other.namespace or one.keys[:KEY_BYTES] != other.keys[:KEY_BYTES]:
        return 0
    low, high = 1, min(len(one.keys), len(other.keys)) // KEY_BYTES
    while low < high:
        middle = (low + high) // 2
        at = middle * KEY_BYTES
        if one.keys[at : at + KEY_BYTES] == other.keys[at : at + KEY_BYTES]:
            low = middle + 1
        else:
            high = middle
    return low


def _tree(rows: list[_Path], shared: list[int]) -> list[_Node]:
    """Ends of paths and the nodes where they branch, with the hits of all paths through them."""
    nodes: list[_Node] = []
    stack: list[_Node] = []  # from the root down to the last path
    for path, depth in zip([*rows, None], shared, strict=True):
        while stack and stack[-1].depth > depth:
            done = stack.pop()
            if depth and not (stack and stack[-1].depth >= depth):
                stack.append(_Node(done.path, depth, 0.0))  # the two paths branch here
                nodes.append(stack[-1])
            if stack:
                done.parent = stack[-1]
                done.parent.hits += done.hits
        if path is not None:
            stack.append(_Node(path, len(path.keys) // KEY_BYTES, path.hits))
            nodes.append(stack[-1])
    return nodes


def _fair(ranked: list[_Node], limit: int) -> list[_Node]:
    """At most `limit` of the nodes, hottest first: for half of that the hottest roots, then the hottest of the rest.

    Preconditions: parents come before children.
    """
    chosen = {id(node) for node in [node for node in ranked if node.parent is None][: -(-limit // 2)]}
    for node in ranked:
        if len(chosen) >= limit:
            break
        if node.parent is None or id(node.parent) in chosen:
            chosen.add(id(node))
    return [node for node in ranked if id(node) in chosen]


def _key(path: _Path, depth: int) -> bytes:
    return path.keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]


def _shown(node: _Node, places: dict[int, int], index: Index) -> dict[str, Any]:
    path, namespace = node.path, node.path.namespace
    windowed = namespace.table.windowed
    return {
        "name": _key(path, node.depth)[:NAME_BYTES].hex(),
        "parent": None if node.parent is None else places[id(node.parent)],
        "namespace": namespace.fingerprint,
        "blocks": node.depth,
        "tokens": node.depth * namespace.spec.block_size,
        "bytes": node.depth * namespace.spec.block_bytes,
        "dram_blocks": 0 if windowed else index.prefix_length(namespace.table, path.keys, node.depth),
        "hits": round(node.hits, 1),
    }
