"""Shell completion of a command, from its own parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

# zsh has its own meaning of `words` and `path`, and splits no variable.
_SCRIPT = """\
_prfaas() {
    local given="" word choices=""
    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD - 1))}"; do case "$word" in -*) ;; *) given="$given $word" ;; esac; done
    case "$given" in
%s
    esac
    COMPREPLY=($(compgen -W "$choices" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _prfaas prfaas
"""


def completion(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return a script for bash, or for zsh by its bash compatibility, to be evaluated by the shell."""
    cases = [f'        {pattern}) choices="{" ".join(words)}" ;;' for pattern, words in _levels(parser, "")]
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return head + _SCRIPT % "\n".join(cases)


def _levels(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the patterns of words given so far and the words that may follow, deepest command first."""
    flags = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    commands: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands |= action.choices
    for name, subparser in commands.items():
        yield from _levels(subparser, f"{path} {name}")
    if commands:
        yield f'"{path}"', [*commands, *flags]
        return
    for place, choices in reversed(list(enumerate(_choices(parser)))):
        yield f'"{path}"' + '" "*' * place, [*choices, *flags]
    yield f'"{path}"*', flags


def _choices(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Return the choices of each positional argument; empty where any text is allowed."""
    places = (action for action in parser._actions if not action.option_strings)
    return [list(map(str, action.choices or ())) for action in places]
