"""What both commands share: how failures end and how help looks. The only module of the contract that needs click."""

from __future__ import annotations

import difflib
import errno
import os
import sys
from pathlib import Path

import click

from tutel_pack.errors import InputError, ResourceError

CONTEXT = {"help_option_names": ["-h", "--help"]}

# Read by OpenMP when torch is loaded, so here, before. Threads that spin while they wait take the processor from those that
# work: on a busy machine a token then takes twenty times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class Commands(click.Group):
    """A group that turns every failure a user can cause or meet into one line on standard error and an exit code.

    default: a sub-command to use where the first argument is none, with its options shown in the group's own help.
    A near miss of a sub-command that is no path either gets a suggestion instead.
    """

    def __init__(self, *args, default: str | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.default = default

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {*self.commands, *ctx.help_option_names, "--version"}
        if args and self.default and args[0] not in own:
            self._reject_near_miss(args[0])
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def _reject_near_miss(self, word: str) -> None:
        near = difflib.get_close_matches(word, self.commands, n=1, cutoff=0.7)
        if near and "/" not in word and not Path(word).exists():
            raise click.UsageError(f"No such command {word!r}. Did you mean {near[0]!r}? (A folder of that name is ./{word}.)")

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.default:
            return super().format_usage(ctx, formatter)
        default = self.commands[self.default]
        formatter.write_usage(ctx.command_path, " ".join(default.collect_usage_pieces(ctx)))
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.default:
            click.Command.format_options(self.commands[self.default], ctx, formatter)
            self.format_commands(ctx, formatter)
        else:
            super().format_options(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = [(name, self.commands[name]) for name in self.list_commands(ctx) if name != self.default]
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=formatter.width)) for name, command in shown])

    def invoke(self, ctx: click.Context):
        try:
            return super().invoke(ctx)
        except (InputError, ResourceError) as e:
            raise _failure(str(e), e.exit_code) from e
        except KeyboardInterrupt:
            raise _interrupted() from None
        except BrokenPipeError:  # whoever read standard output has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it in buffers
            raise _failure("Standard output is full: there is no space left where it goes.", ResourceError.exit_code) from e
        except (MemoryError, RuntimeError) as e:
            if not _out_of_memory(e):
                raise
            reason = (str(e) or type(e).__name__).splitlines()[0]
            raise _failure(f"Out of memory: {reason}", ResourceError.exit_code) from e


def size(count: float) -> str:
    """Bytes in decimal units, as disks and the Hub give them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000


def _failure(message: str, code: int) -> click.ClickException:
    failure = click.ClickException(message)
    failure.exit_code = code
    return failure


def _interrupted() -> click.exceptions.Exit:
    click.echo("\nInterrupted.", err=True)
    return click.exceptions.Exit(130)


def _out_of_memory(error: Exception) -> bool:
    """torch has a class for GPUs only, and words for CPUs."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)
