"""Replays request traces on caches of any size: the hit rates of tiers, policies and sizes.

formats      a trace's lines as Requests (requests), streamed
simulation   Requests on the daemon's own cache, with a disk that keeps no bytes (disk)
hosts        several hosts, which may share a store (shared)
played       a whole trace through one cache, and its hits
optimum      the upper bound for all policies
estimate     hits as FLOPs and seconds
sweep, plot  over sizes
"""
