"""Observation of the daemon's own work. Nothing here changes what it holds.

traffic, hot_prefixes  look-ups and hits; the prefixes most asked for
reuse                  the hit rate that caches of other sizes would have: reuse_stack, distances of a sample of blocks;
                       reuse_curve, look-ups by the size that would have had them
observers              passes on to these what clients ask and store
recorder               records requests in a file for `tiercache replay`
http_process           the HTTP process beside the daemon
"""
