"""The failures a user can cause or meet, each carrying the exit code of both commands."""


class InputError(Exception):
    """Something the user gave is wrong: one sentence that names the thing and the remedy. Exit code 2."""

    exit_code = 2


class ResourceError(Exception):
    """The machine or the network lacks something (space, memory, a reachable Hub): one sentence. Exit code 3."""

    exit_code = 3
