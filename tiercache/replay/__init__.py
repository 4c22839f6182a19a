"""Traces of requests played on caches of any size: what tiers, policies and sizes would have had.

    formats      a trace's lines as Requests, streamed
    simulation   Requests on the daemon's own cache, with a disk that keeps no bytes
    swift        the same decisions for one chain namespace, from the daemon's index and policies alone
    optimum      what no policy can do better than
    estimate     hits as FLOPs and seconds
    sweep, plot  over sizes
"""
