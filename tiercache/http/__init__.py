"""Health, metrics, statistics and the affinity query over HTTP, from a process beside the daemon.

`tiercache daemon --http 127.0.0.1:8181` starts it, `tiercache http` runs it alone. It is an ordinary client of the
daemon, so an HTTP request costs the daemon's loop no more than a client's request. Needs the extra `http`.

    server ──► app: routes ──► metrics ◄── families: every metric; readings: how it is read from the stats
                           ├─► page, history    the dashboard
                           ├─► affinity, models how much of a prompt is stored
                           └─► trees, probe     the daemon's stats, shared by all requests; is the data path whole
    hosts, limits    which requests are taken

A new metric is a `Family` in `families`, a figure in daemon/requests/stats.py, and a row in daemon/MONITORING.md.
"""
