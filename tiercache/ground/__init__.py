"""Helpers that every other folder may use, and that use nothing but `errors`.

units           sizes and durations as people write them
histograms      histograms that are cheap enough for hot paths
uninterrupted   calls that a signal must not cut in half
forks           handles this package's objects in a forked child
isolated        starts a child process without the imports of a folder
file_systems    what stands in the way of a directory, and what a file system lacks
processors      how many cores this process may use
extras          what to install when an optional package is missing
listening, arguments   sockets that listen, and the help format of commands with their own argument parser
"""
