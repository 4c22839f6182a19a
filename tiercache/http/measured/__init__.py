"""The daemon's metrics, by what they measure: name, kind, labels, meaning, and how each is read from the stats.

    family ◄── state, counters, traffic, tiers, clients ◄── families: all of them, in the order of the exposition

Names are stable: a metric keeps its name and meaning.
"""
