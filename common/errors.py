"""Errors that a user can mend."""


class UserError(Exception):
    """Something that the user can mend; the command line prints the message as one sentence, without a traceback.

    The message says what was expected, what was found and what to do.
    """
