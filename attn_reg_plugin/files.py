"""Files: written whole or not at all, locks of folders, lines and JSON objects, and what an OSError means."""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import itertools
import json
import os
import shutil
import socket
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

#: characters other than the newline at which some reader would break a line
_LINE_BREAKS = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))
#: what the temporary names of folders and files contain
TEMPORARY = ".tmp-"
#: errno -> what it means and what helps
_MEANINGS = {
    errno.ENOENT: "there is no such file or folder",
    errno.EACCES: "permission denied; change the permissions, or give another path",
    errno.ENOSPC: "the disk is full; free some space, or give a path on another disk",
    errno.EFBIG: "the file is larger than the system allows here; give a path on another disk, or raise the limit",
    errno.ENAMETOOLONG: "the name is too long; give a shorter one",
    errno.EISDIR: "this is a folder, but must be a file; give the path of a file",
    errno.EEXIST: "this exists already and must be a folder; remove it, or give another path",
    errno.EIO: "the device failed while reading or writing; give a path on another disk",
}
_numbers = itertools.count()


class FolderInUse(ValueError):
    """Another process works in a folder."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; where it has none, the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason_of(error: BaseException) -> str:
    """The type of an error of a library's, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0]}"


def explain(error: OSError, path: Path | str | None = None) -> str:
    """One sentence for an OSError: the path, or `path` where it names none, what is wrong with it, and what to do."""
    if error.errno is None:
        return first_line(error)
    named = path if error.filename is None else os.fsdecode(error.filename)
    meaning = _MEANINGS.get(error.errno, error.strerror or os.strerror(error.errno))
    return meaning if named is None else f"{named}: {meaning}"


@contextlib.contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let an OSError inside that names no path, or one at or below `temporary`, name `path`."""
    try:
        yield
    except OSError as error:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        inside = temporary is not None and any(name.startswith(str(temporary)) for name in names)
        if error.errno is not None and (inside or not names):
            error.filename, error.filename2 = str(path), None
        raise


@contextlib.contextmanager
def naming_writer(path: Path) -> Iterator[None]:
    """Around a library's function that writes and does nothing else: what it raises is an OSError with the path.

    torch and safetensors have errors of their own for a full disk, which name nothing.
    """
    try:
        with naming(path):
            yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = first_line(error)
        said = next((number for number in _MEANINGS if os.strerror(number) in reason), None)
        if said is None and shutil.disk_usage(path.parent).free == 0:
            said = errno.ENOSPC
        message = f"could not be written ({reason}); is the disk full?" if said is None else os.strerror(said)
        raise OSError(said or errno.EIO, message, str(path)) from error


def _beside(path: Path) -> Path:
    """A temporary name in the same folder, also where the file's own name is as long as a name may be."""
    return path.with_name(f".{path.name[:40]}{TEMPORARY}{os.getpid()}-{next(_numbers)}")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which takes the place of `path` at the end; on any error it is deleted.

    A symbolic link is followed. What isn't a regular file, such as `/dev/stdout` or a pipe, is written to directly.
    The folder must be there; an OSError names `path`.
    """
    with naming(path):
        final = Path(os.path.realpath(path))
        os.stat(final.parent)
        if final.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if final.exists() and not final.is_file():
            yield final
            return
    unfinished = _beside(final)
    try:
        with naming(path, unfinished):
            yield unfinished
            os.replace(unfinished, final)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all; an OSError names `path`."""
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{path}: the text holds {half!r}, half a character, which UTF-8 cannot hold") from None
    with whole_file(path) as unfinished:
        unfinished.write_bytes(content)


def write_json(path: Path, content: Any, sort_keys: bool = False) -> None:
    """Write a JSON file, indented, whole or not at all; see `write_text`."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, sort_keys=sort_keys) + "\n")


def read_json(path: Path, advice: str = "") -> dict[str, Any]:
    """The object in a JSON file; `advice` ends the sentence of the ValueError about a file that holds none."""
    end = f"; {advice}" if advice else ""
    text = read_bytes(path)
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON in UTF-8{end}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object, but {type(content).__name__}{end}")
    return content


def one_line(text: str) -> str:
    """The text without its line end, and with a space for every line break inside it."""
    return text.removesuffix("\n").removesuffix("\r").translate(_LINE_BREAKS)


def find_text(folder: Path, name: str) -> Path | None:
    """`name` or `name.gz` in a folder, None where there is neither; both are refused."""
    found = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if len(found) == 2:
        raise ValueError(f"{folder} has both {name} and {name}.gz: remove one of them")
    return found[0] if found else None


def names_in(folder: Path) -> str:
    """The names of what is in a folder, for messages."""
    return ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"


def open_file(path: Path) -> IO[bytes]:
    """A file, open for reading, that has an end.

    Raises:
        ValueError: it is a device, a pipe or a socket, which may have none.
        OSError: there is no such file, or it is a folder or cannot be read.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(f"{path} is not a regular file, but a device, a pipe or a socket; give a file")
    return path.open("rb")


def read_bytes(path: Path) -> bytes:
    """The content of a file; errors as of `open_file`."""
    with open_file(path) as file:
        return file.read()


def raw_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file as they are: split at newlines only (a text may hold other line separators)."""
    try:
        text = read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    return text.removesuffix("\n").split("\n") if text else []


def sha256(path: Path) -> str:
    """The hash of a file's content, in hexadecimal; it is read a block at a time."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, plain or `.gz`, one at a time; a ValueError names the line that isn't UTF-8 text.

    A byte order mark at the start is dropped; line breaks other than the newline become spaces.
    """
    number = 0
    with open_file(path) as plain, gzip.open(plain) if path.suffix == ".gz" else plain as file:
        try:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if b"\0" in line:
                    raise ValueError(f"{path}, line {number}: not text (a NUL byte at position {line.index(0) + 1})")
                yield one_line(text)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(
                f"{path}, line {number}: not UTF-8 (byte 0x{byte:02x} at position {error.start + 1} of the "
                "line); only UTF-8 text is read"
            ) from None
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise ValueError(f"{path}, after line {number}: not a whole gzip file") from None


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, to be filled, which takes its place at the end; on any error it is deleted.

    Args:
        out: a folder that does not exist, or is empty; others are refused. It may be the working directory.
    """
    final = Path(os.path.realpath(out))  # "." has no name of its own
    with naming(out):
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            raise ValueError(f"{out} exists already: give a folder that does not, or an empty one")
    staging = _beside(final)
    made = [folder for folder in final.parents if not folder.exists()]
    try:
        with naming(out, staging):
            staging.mkdir(parents=True)
            yield staging
            if final.exists():
                for path in staging.iterdir():
                    os.replace(path, final / path.name)
            else:
                os.replace(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        for folder in made:  # the inner ones first
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[int]:
    """Hold a folder: a second process is refused until the first, and every process it gave the lock to, has ended.

    Args:
        folder: must be there; a file `lock` in it, which stays, names the process that holds it.
        wait: for the process that holds it, instead of raising `FolderInUse`.

    Yields:
        The descriptor, for processes that are to inherit the lock.
    """
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            who = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            said = f"another process is still working in {folder}{f' ({who})' if who else ''}"
            raise FolderInUse(f"{said}; wait for it or end it") from None
        with contextlib.suppress(OSError):  # a full disk: the name is there for messages only
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield descriptor
    finally:
        os.close(descriptor)
