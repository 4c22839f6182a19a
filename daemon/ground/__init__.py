"""Foundations of the daemon: time, the log, counters, memory, the run directory, slices of work.

    system_calls                        what the kernel must grant, tried at the start
    clock, slices, niceness, memory     the event loop's time, and how it is shared
    run_directory, mounts               files of this process; is a file system mounted
    core_dumps                          none of a process that has keys
    counters, logs, health_log          what it counts and logs
    regions, connections, multipart     the thread that makes the arena; limits on connections and on messages

Imports nothing else of the daemon.
"""
