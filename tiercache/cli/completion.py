"""`tiercache completion`: scripts that complete commands and options, generated from the present command line.

They contain all words. Typer's own completion starts the program at each Tab, a fifth of a second, and knows neither
the options of commands with a parser of their own nor the values that a metavar lists.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

from tiercache.cli.commands import COMMANDS, WITH_PARSER
from tiercache.cli.declare import LOCAL_STATUS, command
from tiercache.cli.exit_status import EXIT_OK
from tiercache.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")
_FILES = re.compile(r"FILE|DIR|RUN_DIR")
_CHOICES = re.compile(r"[a-z0-9-]+(\|[a-z0-9-]+)+")


class Option(NamedTuple):
    """One option of a command. `values`: what may follow it; `files`: whether that is a path."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...] = ()
    files: bool = False


class Command(NamedTuple):
    """One command, or a command in a group (`bench codec`). `words`: what may follow it besides options."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...] = ()
    files: bool = False


@command(
    "completion",
    """\
  tiercache completion bash > /etc/bash_completion.d/tiercache
  tiercache completion zsh >> ~/.zshrc
  tiercache completion fish > ~/.config/fish/completions/tiercache.fish
""",
    LOCAL_STATUS,
)
def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="The shell to complete commands in.")],
) -> int:
    """Print a script for a shell that completes commands and options, without running tiercache."""
    if shell not in SHELLS:
        raise ConfigError(f"{shell}: there is completion for {', '.join(SHELLS)}")
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](commands(context.find_root())))
    return EXIT_OK


# --- words to complete -------------------------------------------------------------------------------


def commands(root: Any) -> list[Command]:
    """All commands with their options; `root` is the context of the app."""
    found = []
    for name, about in ((one.name, one.about) for one in COMMANDS.values()):
        if name in WITH_PARSER:
            found.append(_of_parser(name, about, import_module(COMMANDS[name].module).make_parser()))
            continue
        declared = root.command.get_command(root, name)
        inner = getattr(declared, "commands", {})
        found += [Command(name, about, (), tuple(inner))] if inner else [_of_click(name, declared)]
        found += [_of_click(f"{name} {word}", command) for word, command in inner.items()]
    return found


def _of_click(name: str, command: Any) -> Command:
    options: list[Option] = []
    files, words = False, tuple[str, ...]()
    for one in command.params:
        metavar, takes_value = str(one.metavar or ""), not getattr(one, "is_flag", False)
        values = tuple(metavar.split("|")) if _CHOICES.fullmatch(metavar) else ()
        is_path = takes_value and bool(_FILES.search(metavar))
        if one.param_type_name == "argument":
            files, words = files or is_path, values
        else:
            text = one.help or ""
            options.append(Option((*one.opts, *one.secondary_opts), text, takes_value, values, is_path))
    return Command(name, command.get_short_help_str(), (*options, _HELP), words, files)


def _of_parser(name: str, text: str, parser: argparse.ArgumentParser) -> Command:
    options, files = [], False
    for one in parser._actions:
        metavar, takes_value = str(one.metavar or ""), one.nargs != 0
        values = tuple(map(str, one.choices or ())) or (
            tuple(metavar.split("|")) if _CHOICES.fullmatch(metavar) else ()
        )
        is_path = takes_value and bool(_FILES.search(metavar))
        if not one.option_strings:
            files = files or is_path or metavar == "MODEL"
        elif one.help is not argparse.SUPPRESS:
            options.append(Option(tuple(one.option_strings), str(one.help or ""), takes_value, values, is_path))
    return Command(name, text, tuple(options), (), files)


_HELP = Option(("-h", "--help"), "Show this help.", takes_value=False)


# --- scripts -----------------------------------------------------------------------------------------


def bash(found: list[Command]) -> str:
    """The script for bash 4 or later, which zsh also runs."""
    top = " ".join(sorted(command.name for command in found if " " not in command.name))
    cases = "\n".join(line for command in found for line in _bash_case(command))
    groups = "|".join(command.name for command in found if command.words and not command.options)
    return f"""\
# Completion of tiercache, made by `tiercache completion`.
_tiercache() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}} words= paths=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{top} --help"
    else
        case "$command" in
            {groups or "nothing"}) [ "$COMP_CWORD" -gt 2 ] && command="$command ${{COMP_WORDS[2]}}" ;;
        esac
        case "$command:$prev" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [ -n "$paths" ] && [ "${{cur:0:1}}" != - ]; then
        COMPREPLY+=($(compgen -f -- "$cur"))
    fi
}}
complete -o filenames -F _tiercache tiercache"""


def _bash_case(command: Command) -> Iterator[str]:
    """The lines for one command: after options that take a value, then everywhere else."""
    for one in command.options:
        if one.takes_value:
            names = "|".join(shlex.quote(f"{command.name}:{name}") for name in one.names)
            does = f'words="{" ".join(one.values)}"' if one.values else "paths=1" if one.files else "return"
            yield f"            {names}) {does} ;;"
    words = " ".join([*command.words, *(name for one in command.options for name in one.names)])
    paths = "; paths=1" if command.files else ""
    yield f'            {shlex.quote(command.name + ":")}*) words="{words}"{paths} ;;'


def zsh(found: list[Command]) -> str:
    """The same function, through zsh's own support for bash completions."""
    return f"autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n{bash(found)}"


def fish(found: list[Command]) -> str:
    """The script for fish, with the help of each option."""
    lines = ["# Completion of tiercache, made by `tiercache completion`.", "complete -c tiercache -f"]
    for known in found:
        outer, _, inner = known.name.partition(" ")
        if inner:
            seen = f"__fish_seen_subcommand_from {outer}; and __fish_seen_subcommand_from {inner}"
            first = f"__fish_seen_subcommand_from {outer}; and not __fish_seen_subcommand_from {inner}"
            lines.append(f"complete -c tiercache -n '{first}' -a {inner} -d {_fish_text(known.help)}")
        else:
            seen = f"__fish_seen_subcommand_from {outer}"
            lines.append(f"complete -c tiercache -n __fish_use_subcommand -a {outer} -d {_fish_text(known.help)}")
            words = "" if not known.options else " ".join(known.words)
            if words or known.files:
                what = f"-a '{words}'" if words else "-F"
                lines.append(f"complete -c tiercache -n '{seen}' {what}")
        lines += [_fish_option(seen, one) for one in known.options]
    return "\n".join(lines)


def _fish_option(seen: str, one: Option) -> str:
    names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in one.names)
    value = " -r" if one.takes_value else ""
    if one.values:
        value = f" -x -a '{' '.join(one.values)}'"
    elif one.files:
        value = " -r -F"
    return f"complete -c tiercache -n '{seen}' {names}{value} -d {_fish_text(one.help)}"


def _fish_text(text: str) -> str:
    """The first sentence, quoted."""
    short = " ".join(text.replace("%%", "%").split()).split(". ")[0][:80]
    quoted = short.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"
