"""The daemon's metrics, by what they measure: name, kind, labels, meaning, and how each is read from the stats.

    family ◄── state, counters, traffic, tiers, shared, clients ◄── http/metrics: FAMILIES, all in their order

Names are stable: a metric keeps its name and meaning.
"""
