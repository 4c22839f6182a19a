"""All commands: what each is for, the module with its declaration and its work, and the line about it in the help.

`tiercache --help` prints this list. A command's module is imported only when that command is asked for, so none waits
for the imports of the others.
"""

from __future__ import annotations

from typing import NamedTuple

RUN, LOOK, CHANGE, MEASURE, SERVE = "Run", "Look", "Change", "Measure", "Serve"
PURPOSES = (RUN, LOOK, CHANGE, MEASURE, SERVE)
"""Groups of commands by purpose, in the order of the help."""


class Listed(NamedTuple):
    """A command of the list. `about`: the first sentence of its own help."""

    name: str
    purpose: str
    module: str
    about: str


_LIST = (
    Listed("daemon", RUN, "tiercache.daemon.__main__", "Run the daemon in the foreground until SIGTERM."),
    Listed(
        "config",
        RUN,
        "tiercache.cli.config",
        "Print the settings that a daemon started here would use, or with --running those of the running daemon.",
    ),
    Listed("version", RUN, "tiercache.cli.app", "Print the versions of tiercache and of what it runs on."),
    Listed(
        "keygen",
        RUN,
        "tiercache.cli.keygen",
        "Make keys for clients on other hosts; their connections are always encrypted.",
    ),
    Listed(
        "completion",
        RUN,
        "tiercache.cli.completion",
        "Print a script for a shell that completes commands and options, without running tiercache.",
    ),
    Listed("check", LOOK, "tiercache.cli.check", "Look for faults in nvme directories, or in a running daemon."),
    Listed(
        "doctor",
        LOOK,
        "tiercache.cli.doctor.command",
        "Examine the host, its disks and the daemon, and name a remedy for each problem.",
    ),
    Listed(
        "stats",
        LOOK,
        "tiercache.cli.stats",
        "Show what the daemon holds, how often it is asked and how fast it answers.",
    ),
    Listed(
        "top",
        LOOK,
        "tiercache.cli.top.command",
        "Watch the daemon on a terminal: tiers, hit rates, namespaces, hot prefixes, clients, queues, health.",
    ),
    Listed(
        "ls",
        LOOK,
        "tiercache.cli.ls",
        "List the namespaces of the daemon: engine, model, rank, blocks by tier, hits, last use, pins.",
    ),
    Listed("inspect", LOOK, "tiercache.cli.inspect", "Show where a block is stored, or how much of a prompt."),
    Listed("affinity", LOOK, "tiercache.cli.affinity", "Show how many tokens of a prompt are stored, by tier."),
    Listed(
        "lint",
        LOOK,
        "tiercache.cli.lint.command",
        "Find what keeps prompts from being reused: times and ids at the front, tools or documents in changing order.",
    ),
    Listed("ping", LOOK, "tiercache.cli.ping", "Check whether the daemon answers, and how long it takes."),
    Listed("flush", CHANGE, "tiercache.cli.flush", "Forget blocks."),
    Listed(
        "pin",
        CHANGE,
        "tiercache.cli.pin",
        "Keep a prefix in DRAM, loaded from disk if necessary: a block and all before it, or a prompt.",
    ),
    Listed("unpin", CHANGE, "tiercache.cli.pin", "Let pinned prefixes be evicted again."),
    Listed(
        "set", CHANGE, "tiercache.cli.config", "Change a setting of a running daemon: log_level, quota or nvme_quota."
    ),
    Listed(
        "demo",
        MEASURE,
        "tiercache.cli.demo.command",
        "Serve one long prompt from scratch, from the cache, and while the daemon is dead; then conversations.",
    ),
    Listed(
        "plan",
        MEASURE,
        "tiercache.cli.plan",
        "Size a deployment on paper: KV per token, what each tier holds, and when loading beats computing.",
    ),
    Listed(
        "replay",
        MEASURE,
        "tiercache.cli.replay",
        "Play a trace on caches of other sizes: hit rates by tier, time saved, and the best possible result.",
    ),
    Listed("bench", MEASURE, "tiercache.cli.bench.command", "Measure on this machine."),
    Listed("serve", SERVE, "tiercache.cli.serve", "Serve a model over HTTP, with an interface like OpenAI's."),
    Listed(
        "http",
        SERVE,
        "tiercache.http.__main__",
        "Serve health, metrics, statistics and the affinity query of a daemon over HTTP.",
    ),
)
COMMANDS = {command.name: command for command in _LIST}

WITH_PARSER = ("daemon", "serve", "http")
"""Commands that read their own command line: the module has `main` and `make_parser`, and needs no typer."""
