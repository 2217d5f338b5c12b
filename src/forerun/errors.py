"""The one exception users see: its message is a single line that says what to do."""


class ForerunError(Exception):
    """Bad input, a broken model or an impossible wish. The command line prints the message and exits with code 2."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else says, short enough to be repeated in a line of ours."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
