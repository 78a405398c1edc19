"""The one exception for a user's mistake: commands print its message as a single line and leave with code 2."""


class UserError(Exception):
    """Bad input: the message names the file, key or flag and says what to do about it."""


class UnusableImage(UserError):
    """One image cannot be used, whatever the machine: a loader that may skip images goes on without it."""
