"""The one exception users see: its message is a single line that says what to do."""


class ForerunError(Exception):
    """Bad input, a broken model or an impossible wish. The command line prints the message and exits with code 2."""
