"""Completion of the command line in bash, zsh and fish: sub-commands, their options, and overrides."""

from __future__ import annotations

from collections.abc import Callable

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class, shell_complete

from kvbench.terminal.command import Commands

Fields = Callable[[click.Context, click.Parameter | None, str], list[str]]


class Bash(BashComplete):
    """Bash splits words at `=`, and completes only the part behind it."""

    source_template = BashComplete.source_template.replace("-o nosort", "-o nosort -o nospace")

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the incomplete one, and it, with `policy = snapkv` joined again."""
        words: list[str] = []
        args, incomplete = super().get_completion_args()
        for word in (*args, incomplete):
            if words and (word.startswith("=") or words[-1].endswith("=")):
                words[-1] += word
            else:
                words.append(word)
        self.split = "=" in words[-1]
        return words[:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """The item as the script reads it: a complete word ends with a space."""
        value = item.value.rpartition("=")[2] if self.split else item.value
        return f"{item.type},{value}{'' if value.endswith(('=', '.')) or item.type != 'plain' else ' '}"


class Overrides(Commands):
    """Completes sub-commands, and overrides where none is named. fields: `shell_complete` of an argument of click."""

    def __init__(self, commands: Commands, fields: Fields) -> None:
        super().__init__(str(commands.name), commands.places, "")
        self.fields = fields

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """A sub-command as the first word, fields, and the names of a group after `policy=`."""
        ctx.args = [*ctx._protected_args, *ctx.args]
        names = [] if ctx.args else self.list_commands(ctx)
        words = [name for name in names if name.startswith(incomplete)]
        return [CompletionItem(word) for word in (*words, *self.fields(ctx, None, incomplete))]


def complete(commands: Commands, fields: Fields, instruction: str, variable: str) -> int:
    """Print the script of a shell (`bash_source`) or the completions it asks for; returns the exit code."""
    add_completion_class(Bash)
    return shell_complete(Overrides(commands, fields), {}, "kvbench", variable, instruction)
