"""The `tiercache` command. `main` is its entry point, `app` all commands together.

    app_run, app_look, app_change, ...          declare the commands: options and help, in groups (command_line)
        ↓ import, when called
    ping, stats, top, flush, pin, doctor, ...   do the work, a file for each command or two that belong together
        ↓
    control, report, live, exits                reach the daemon, print, look again and again, exit statuses

A new command is a function in an `app_*` file (a new one goes into `app.MODULES`) and a file that does its work.
"""
