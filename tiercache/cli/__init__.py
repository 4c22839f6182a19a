"""The `tiercache` command.

    main ──► app ──► commands: the list; which module has which command
                        ↓ imports the module of the command that is asked for
    affinity, check, completion, config, flush, inspect, keygen, ls, pin, ping, plan, replay, serve, stats
                                            a file for each command: its declaration (options, help) and its work
    bench/, demo/, doctor/, lint/, top/     a folder where the work takes several files; `command` declares it
                        ↓
    declare, connection, report, readings,  for all commands: declare one, reach the daemon, print, take figures
    hardware, exit_status, unnamed_file

A new command is a file with a function under `@declare.command`, and a line in `commands`. Only the programs that run
for long, `daemon`, `serve` and `http`, have parsers of their own. Whatever takes long to import is imported in the
function: each help must come at once.
"""
