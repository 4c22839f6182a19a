"""What the daemon knows of its own work. Nothing here changes what it holds.

    histograms             those of `tiercache stats`; requests/stats answers with them and with all other figures
    traffic, hot_prefixes  what was asked for, and found; which prefixes most
    reuse*                 the hit rate that caches of other sizes would have
    recorder               requests, in a file for `tiercache replay`
    http_process           the HTTP process beside the daemon
"""
