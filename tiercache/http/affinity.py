"""The affinity query for load balancers: how much of a prompt is stored, and in which order of its parts it is most.

The engines have told the daemon their models and how they hash blocks (`ModelCard`). The tenant's salt comes with each
query, since keys cannot be made without it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from tiercache.client.client import Client
from tiercache.errors import TierCacheError
from tiercache.http.ordering import Budget, OrderSearch
from tiercache.http.peeking import ModelBlocks, ModelsKnown
from tiercache.http.query import Query, is_meant
from tiercache.protocol import messages as m

__all__ = ["Affinity", "Query", "UnknownModel"]

LIST_S = 1.0
"""How long the list of models is used before it is fetched again. A model that is not in it is always asked for."""


class UnknownModel(TierCacheError):
    """No engine that is connected to the daemon has announced this model."""


class Affinity:
    """Answers queries. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._models: ModelsKnown | None = None

    def ask(self, query: Query) -> dict[str, Any]:
        """The answer as a tree: tokens matched by tier, in total and for each model of that name.

        One round trip to the daemon for each model, and one a second for the list of models, or one if it does not
        have this model; with segments as many as `ordering` allows. Raises UnknownModel, DaemonUnavailable,
        RequestRefused.
        """
        came_s = time.monotonic()
        models = self._listed(came_s - LIST_S)
        cards = [card for card in models.cards if is_meant(card, query)]
        if not cards:
            models = self._listed(came_s)
            cards = [card for card in models.cards if is_meant(card, query)]
        if not cards:
            names = sorted({name for card in models.cards for name in card.names})
            known = f"there are {', '.join(names[:8])}" if names else "none has announced one"
            raise UnknownModel(f"{query.model}: no engine here has announced this model ({known})")
        every = [ModelBlocks(models, card, query) for card in cards]
        found, ordering = _ordered(every, query)
        tokens = query.prompt(found)
        chains = [stored.chain(tokens) for stored in every]
        best = max(chains, key=lambda chain: int(chain["matched"]))
        return {
            "model": query.model,
            "tokens": len(tokens),
            "matched": best["matched"],
            "matched_tokens": best["matched_tokens"],
            **ordering,
            "chains": chains,
        }

    def _listed(self, since_s: float) -> ModelsKnown:
        """The models, from a list asked for at `since_s` or later; queries that wait for one share it."""
        session = self._client.session()
        with self._lock:
            models = self._models
            if models is None or models.session is not session or models.asked_s < since_s:
                asked_s = time.monotonic()
                reply = session.call(m.Models)
                models = self._models = ModelsKnown(session, asked_s, reply.models, reply.namespaces, reply.windows)
        return models


def _ordered(every: list[ModelBlocks], query: Query) -> tuple[list[list[int]], dict[str, Any]]:
    """The order with the longest match of any of these models, and what the answer says of it."""
    if not isinstance(query.segments, list):
        return [], {}
    budget = Budget()
    found = [OrderSearch(stored, query, budget).find() for stored in every]
    best = max(found, key=lambda one: one.matched)  # the first of several: its order is the caller's if that is one
    complete = all(one.complete for one in found)
    return best.order, {"order": best.order, "matched_as_given": best.as_given, "complete": complete}
