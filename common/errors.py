"""Errors that the user can fix."""


class UserError(Exception):
    """An error that the user can fix; the command line prints the message as one sentence, without a traceback.

    The message has the form "Expected ..., got ...: do ...".
    """
