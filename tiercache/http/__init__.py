"""Health, metrics, statistics and the affinity query over HTTP, from a process beside the daemon.

`tiercache daemon --http 127.0.0.1:8181` starts it, `tiercache http` runs it alone. It is an ordinary client of the
daemon, so an HTTP request costs the daemon's loop no more than a client's request. Needs the extra `http`.

    server ──► app: routes ──► metrics ◄── families: the daemon's metrics ◄── readings: as read from stats
                           ├─► history    what the dashboard shows
                           ├─► affinity   how much of a prompt is stored; models: their names
                           └─► probe      a test block
    app: Trees   the daemon's stats, asked once for all requests that wait
    query ──► affinity ──► ordering: which order of a prompt's parts ──► peeking: what is stored ──► block_names
    hosts, limits    which requests are taken

A new metric of the daemon: a counter is a field of daemon/ground/counters.py and a text in families.COUNTERS; any other
figure comes from daemon/requests/stats.py and is a `Family` there. `python -m tiercache.http.metrics`
prints the table of daemon/MONITORING.md, with a row for each. `tiercache serve` and vLLM define theirs in
serve/metrics.py and connectors/vllm/log.py.
"""
