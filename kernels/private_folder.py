"""Folders that code and weights are loaded from: nobody else may have put anything there.

Whoever may write such a file, or a folder on the way to it, runs code as the user who
loads it. So owner and mode of each are looked at, as sshd does with keys.
"""

import os
import stat
from pathlib import Path

#: ``1``: whoever may write to the caches is trusted, as in a container that is alone with its volumes.
TRUSTED = "VORRANG_CACHE_TRUSTED"

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UntrustedPath(OSError):
    """Somebody else owns a path that is loaded from, or may write to it; the message says which and who."""


def checked(path: Path) -> Path:
    """The folder without symbolic links, none of which is followed later.

    What is not there yet counts as in order. Parents are checked too; a sticky one may
    be writable, as nobody can replace in it what is another's.

    Raises:
        UntrustedPath: somebody else may write to it or to one of its parents.
        OSError: it can't be looked at.
    """
    folder = Path(os.path.realpath(path))
    for part in (*reversed(folder.parents), folder):
        try:
            found = part.lstat()
        except FileNotFoundError:
            break
        _check(part, found, may_be_sticky=part != folder)
    return folder


def made(path: Path) -> Path:
    """The same, made first where it is not there, with its parents: for this user alone (0700).

    Raises:
        UntrustedPath: see ``checked``.
        OSError: it can't be made.
    """
    folder = checked(path)
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(mode=stat.S_IRWXU, exist_ok=True)
    return checked(folder)


def check_file(path: Path) -> None:
    """A file in a folder that was checked.

    Raises:
        UntrustedPath: somebody else owns it or may write to it, or it is a link or no file.
        OSError: it can't be looked at.
    """
    found = path.lstat()
    if os.environ.get(TRUSTED) != "1" and not stat.S_ISREG(found.st_mode):
        raise UntrustedPath(f"{path} must be a file, and no link")
    _check(path, found, may_be_sticky=False)


def _check(path: Path, found: os.stat_result, *, may_be_sticky: bool) -> None:
    if os.environ.get(TRUSTED) == "1":
        return
    me = os.geteuid()
    if found.st_uid not in (0, me):
        raise UntrustedPath(f"{path} must be owned by user {me} or root, not by user {found.st_uid}")
    is_sticky = may_be_sticky and bool(found.st_mode & stat.S_ISVTX)
    if found.st_mode & _WRITABLE_BY_OTHERS and not is_sticky:
        mode = stat.S_IMODE(found.st_mode)
        raise UntrustedPath(f"{path} must be writable by its owner alone (go-w), its mode is {mode:04o}")
