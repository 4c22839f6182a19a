"""Replays request traces on caches of any size: the hit rates of tiers, policies and sizes.

    formats      a trace's lines as Requests, streamed
    simulation   Requests on the daemon's own cache, with a disk that keeps no bytes
    swift        the same decisions for one chain namespace, from the daemon's index and policies alone
    optimum      upper bound of all policies
    estimate     hits as FLOPs and seconds
    sweep, plot  over sizes
"""
