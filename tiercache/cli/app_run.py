"""The commands that run the daemon, and those that prepare it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from tiercache.cli.command_line import OWN_HELP, RUN, Address, Json, app, ending
from tiercache.cli.exits import EXIT_OK


@app.command(rich_help_panel=RUN, **OWN_HELP)
def daemon(context: typer.Context) -> int:
    """Run the daemon in the foreground until SIGTERM."""
    from tiercache.daemon.__main__ import main as command

    return command(context.args) or EXIT_OK


@app.command(
    rich_help_panel=RUN,
    epilog=ending("""\
  tiercache config > tiercache.toml   a file to start from: every setting, explained
  TIERCACHE_ARENA=16GiB tiercache config
                                      says where each value that was chosen came from
  tiercache config --running          what a daemon runs with, and what a restart would change
"""),
)
def config(
    path: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="TOML file (default: $TIERCACHE_CONFIG).")
    ] = None,
    running: Annotated[bool, typer.Option("--running", help="Those of the daemon that runs.")] = False,
    as_json: Json = False,
    address: Address = None,
) -> int:
    """Print the settings that a daemon started here would have, or with --running those that one has.

    SIGHUP (systemctl reload) has a daemon read its settings again: log_level and the quotas change at once.
    """
    from tiercache.cli import config as command

    if running:
        return command.show_running(address, as_json=as_json)
    return command.show(path, as_json=as_json)


@app.command(
    rich_help_panel=RUN,
    epilog=ending(
        """\
  tiercache version
""",
        "0 always",
    ),
)
def version(as_json: Json = False) -> int:
    """Print the versions of tiercache and of what it runs on."""
    from tiercache.cli import config as command

    return command.version(as_json=as_json)


@app.command(
    rich_help_panel=RUN,
    epilog=ending("""\
  tiercache keygen /etc/tiercache/keys
                                      the daemon's own keys, if it has none
  tiercache keygen /etc/tiercache/keys team-a
                                      let team-a in, and write its key to team-a.toml
  tiercache ping --address 'tcp://10.0.0.5:7411?key=team-a.toml'
"""),
)
def keygen(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The daemon's --curve-keys.")],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A client to let in: its tenant.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where its key goes (NAME.toml).")] = None,
) -> int:
    """Make keys for clients on other hosts, which are served encrypted or not at all."""
    from tiercache.cli.keygen import keygen as command

    return command(directory, name, out)


@app.command(
    rich_help_panel=RUN,
    epilog=ending("""\
  tiercache completion bash > /etc/bash_completion.d/tiercache
  tiercache completion zsh >> ~/.zshrc
  tiercache completion fish > ~/.config/fish/completions/tiercache.fish
"""),
)
def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to complete commands in.")],
) -> int:
    """Print a script that completes commands and options; it runs nothing of tiercache."""
    from tiercache.cli import completion as command

    group = context.find_root().command
    assert isinstance(group, TyperGroup)
    return command.show(shell, group)
