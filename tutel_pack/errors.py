"""The failures a user can cause or meet, each carrying the exit code of both commands."""

_LONGEST = 1000


class _Failure(Exception):
    """One sentence. What it quotes of files may be hostile, so control characters are escaped and the middle of what is
    too long for a terminal is left out (the remedy stands at the end)."""

    def __init__(self, sentence: str):
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 203]} … {line[-200:]}")


class InputError(_Failure):
    """Something the user gave is wrong: one sentence that names the thing and the remedy. Exit code 2."""

    exit_code = 2


class ResourceError(_Failure):
    """The machine or the network lacks something (space, memory, a reachable Hub): one sentence. Exit code 3."""

    exit_code = 3
