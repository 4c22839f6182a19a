"""What every other folder may use, and what uses nothing but `errors`.

    units           sizes and durations as people write them
    histograms      histograms that are cheap enough for hot paths
    uninterrupted   calls that a signal must not cut in half
    forks           what objects of a parent process do in a forked child
    isolated        how a child process is started without the imports of a folder
    extras          what to install when an optional package is missing
    listening, arguments   sockets that listen, and the help of commands that read their own command line
"""
