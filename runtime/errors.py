"""The error of a configuration; what requests are refused with is the contract's (contract/errors.py)."""

from __future__ import annotations

import errno

# Beside the text of the operating system, what helps.
_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EISDIR: "a directory stands where a file belongs; move it away",
    errno.EEXIST: "something else stands there; move it away",
    errno.ENOTDIR: "a file stands where a directory belongs; move it away",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


class ConfigError(Exception):
    """The configuration cannot be used; the message names file, key and remedy."""


def described(error: OSError) -> str:
    """What an operating system's error says to who can mend it: the file, the problem and a remedy."""
    problem = error.strerror or str(error) or type(error).__name__
    file = error.filename2 or error.filename
    where = f"{file}: " if file else ""
    return f"{where}{problem}; {_REMEDIES.get(error.errno or 0, 'see to it, and start again')}"
