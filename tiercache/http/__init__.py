"""Health, metrics, statistics and the affinity query over HTTP, from a process beside the daemon.

`tiercache daemon --http 127.0.0.1:8181` starts it, `tiercache http` runs it alone: an ordinary client of the daemon,
so whatever it is asked costs the daemon's loop no more than a request. Needs the extra `http`.
"""
