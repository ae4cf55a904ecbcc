"""Copies of a work directory: received as .tar.gz, kept by digest, unpacked for a job.

An archive comes from a stranger. Nothing of it reaches the file system before every member has been looked at: plain
files, folders and links that stay inside, no name twice, no absolute path, no "..", no device, no file below a link,
and no more bytes than the limit however well they are packed. The same check runs at the upload, so that its owner
hears of a fault at once, and again while unpacking.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import os
import re
import shutil
import tarfile
import time
import zlib
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal
from uuid import uuid4

from thebes.jobspec.spec import JOB_ID
from thebes.live.errors import Invalid, NotFound, TooLarge, Unavailable
from thebes.live.limits import Limits

DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_MEMBERS = 100_000
MAX_HEADER_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20
DAY_S = 86_400.0

PackedKind = Literal["folder", "file", "link"]


@dataclass(frozen=True)
class PackedFile:
    """One entry of an archive that has passed the check. `parts` is its path below the target folder."""

    parts: tuple[str, ...]
    kind: PackedKind
    info: tarfile.TarInfo
    content: IO[bytes] | None  # of a file
    same_as: tuple[str, ...] | None = None  # for a hard link, the earlier file


class Snapshots:
    """The archives of one instance, in `snapshots/`, and their unpacking into `jobs/JOB/snapshot`."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.folder = folder / "snapshots"
        self.jobs = folder / "jobs"
        self.limits = limits or Limits()

    def path(self, digest: str) -> Path:
        """The place of an archive. The digest is checked here, for every caller."""
        if not DIGEST.fullmatch(digest):
            raise Invalid("not the digest of a snapshot", hint="64 hexadecimal digits, as the upload answered")
        return self.folder / f"{digest}.tar.gz"

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    async def receive(self, blocks: AsyncIterator[bytes], expected: str | None = None) -> tuple[str, int]:
        """Write an upload to disk, check it, keep it under its digest; returns digest and size."""
        draft = self.folder / f".upload-{uuid4().hex}"
        try:
            digest, size = await self._write(draft, blocks)
            if expected is not None and digest != expected:
                raise Invalid("the snapshot arrived damaged: its digest is another one", hint="upload it again")
            await asyncio.to_thread(inspect, draft, self.limits.unpacked_bytes)
            await asyncio.to_thread(_keep, draft, self.path(digest))
        except OSError as error:
            raise _disk_trouble(error) from error
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        return digest, size

    async def _write(self, draft: Path, blocks: AsyncIterator[bytes]) -> tuple[str, int]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest, size, limit = hashlib.sha256(), 0, self.limits.snapshot_bytes
        waiting = bytearray()
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as out:

            def put(data: bytes) -> None:
                digest.update(data)
                out.write(data)

            async for block in blocks:
                size += len(block)
                if size > limit:
                    raise too_large(limit)
                waiting += block
                if len(waiting) >= BLOCK_BYTES:
                    await asyncio.to_thread(put, bytes(waiting))
                    waiting.clear()
            await asyncio.to_thread(put, bytes(waiting))
            await asyncio.to_thread(os.fsync, out.fileno())
        return digest.hexdigest(), size

    def unpack(self, digest: str, job_id: str) -> Path:
        """Unpack the snapshot as the job's own folder, once per job, whole or not at all. Call it in a thread."""
        if not re.fullmatch(JOB_ID, job_id):
            raise Invalid("not the id of a job")
        target = self.jobs / job_id / "snapshot"
        if target.is_dir():
            return target
        archive = self.path(digest)
        draft = target.with_name(f".snapshot-{uuid4().hex}")
        try:
            draft.mkdir(mode=0o700, parents=True)
            for member in members(archive, self.limits.unpacked_bytes):
                _place(member, draft)
            draft.rename(target)
        except FileNotFoundError as error:
            if archive.exists():
                raise _disk_trouble(error) from error
            raise NotFound(f"snapshot {digest[:12]} is not here", hint="upload it again") from None
        except OSError as error:
            raise _disk_trouble(error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target

    def any_older(self, older_than_s: float = DAY_S) -> bool:
        return next(self._older(older_than_s), None) is not None

    def prune(self, keep: Collection[str], *, older_than_s: float = DAY_S) -> int:
        """Remove archives (and uploads that broke off) that no job names and that are old enough; returns how many."""
        removed = 0
        for path in list(self._older(older_than_s)):
            if path.name.split(".")[0] not in keep:
                with suppress(OSError):
                    path.unlink()
                    removed += 1
        return removed

    def _older(self, older_than_s: float) -> Iterator[Path]:
        now_s = time.time()
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                with suppress(OSError):
                    if now_s - path.stat().st_mtime > older_than_s:
                        yield path


def too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"the snapshot is larger than {limit_bytes >> 20} MiB",
        hint="name data and checkpoints in .thebesignore, or leave --snapshot out",
    )


def inspect(archive: Path, limit_bytes: int) -> None:
    """Raise Invalid if anything in the archive may not be unpacked."""
    for _ in members(archive, limit_bytes):
        pass


def members(archive: Path, limit_bytes: int) -> Iterator[PackedFile]:
    """The entries of an archive, each checked against all before it. A file's content must be read before the next."""
    seen: dict[tuple[str, ...], PackedKind] = {(): "folder"}
    with archive.open("rb") as raw:
        try:
            with tarfile.open(fileobj=_Bounded(raw, limit_bytes), mode="r:") as tar:  # type: ignore[arg-type]
                while (info := tar.next()) is not None:
                    tar.members.clear()  # otherwise all of them would be kept
                    member = _checked(tar, info, seen)
                    if member is not None:
                        yield member
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, OverflowError) as error:
            raise Invalid(f"the snapshot is not a sound .tar.gz archive: {error}") from None


def _checked(tar: tarfile.TarFile, info: tarfile.TarInfo, seen: dict[tuple[str, ...], PackedKind]) -> PackedFile | None:
    parts = _inside(info.name, info)
    if not parts:
        return None  # "." itself
    if len(seen) > MAX_MEMBERS:
        raise Invalid(f"the snapshot has more than {MAX_MEMBERS} entries")
    if info.size < 0 or info.issparse():
        raise _refused(info, "it is a sparse file")
    for depth in range(1, len(parts)):
        if seen.setdefault(parts[:depth], "folder") != "folder":
            raise _refused(info, "it lies below something that is not a folder")
    kind = _kind(info)
    if parts in seen and not (kind == "folder" and seen[parts] == "folder"):
        raise _refused(info, "it is there twice")
    same_as = None
    if info.issym():
        _check_link(info, len(parts) - 1)
    elif info.islnk():
        same_as = _inside(info.linkname, info)
        if seen.get(same_as) != "file":
            raise _refused(info, "it is a link to something that is not in the snapshot")
    seen[parts] = kind
    return PackedFile(parts, kind, info, tar.extractfile(info) if info.isreg() else None, same_as)


def _kind(info: tarfile.TarInfo) -> PackedKind:
    if info.isdir():
        return "folder"
    if info.isreg() or info.islnk():
        return "file"
    if info.issym():
        return "link"
    raise _refused(info, "it is a device or a pipe")


def _inside(name: str, info: tarfile.TarInfo) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise _refused(info, "its path leads out of the folder")
    if len(name) > 4096 or any(len(os.fsencode(part)) > 255 for part in parts):
        raise _refused(info, "its path is too long")
    return parts


def _check_link(info: tarfile.TarInfo, depth: int) -> None:
    """Refuse a link that leaves the folder: it may go up as far as the folder, then down, also through other links."""
    target = [part for part in info.linkname.split("/") if part not in ("", ".")]
    up = next((at for at, part in enumerate(target) if part != ".."), len(target))
    if info.linkname.startswith("/") or "\0" in info.linkname or up > depth or ".." in target[up:]:
        raise _refused(info, "it is a link that leads out of the folder")


def _refused(info: tarfile.TarInfo, why: str) -> Invalid:
    return Invalid(f"the snapshot may not hold {info.name[:200]!r}: {why}")


class _Bounded:
    """A packed file that is unpacked as it is read: at most `limit_bytes` in all, and no huge piece at once."""

    def __init__(self, raw: IO[bytes], limit_bytes: int) -> None:
        self._stream = gzip.GzipFile(fileobj=raw, mode="rb")
        self._limit_bytes = limit_bytes

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError("a header is too large")
        data = self._stream.read(size)
        self._check()
        return data

    def seek(self, offset: int) -> int:
        while (gap := offset - self._stream.tell()) > 0 and self.read(min(gap, MAX_HEADER_BYTES)):
            pass
        return self._stream.tell() if gap >= 0 else self._stream.seek(offset)

    def tell(self) -> int:
        return self._stream.tell()

    def _check(self) -> None:
        if self._stream.tell() > self._limit_bytes:
            raise Invalid(f"the snapshot is larger than {self._limit_bytes >> 20} MiB when unpacked")


def _place(member: PackedFile, folder: Path) -> None:
    """Make one entry below an empty folder of our own. Parents are made by us, so none of them is a link."""
    path = folder.joinpath(*member.parts)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if member.kind == "folder":
        path.mkdir(mode=0o700, exist_ok=True)
    elif member.kind == "link":
        path.symlink_to(member.info.linkname)
    elif member.same_as is not None:
        path.hardlink_to(folder.joinpath(*member.same_as))
    else:
        mode = 0o600 | (member.info.mode & 0o155)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(handle, "wb") as out:
            assert member.content is not None
            shutil.copyfileobj(member.content, out, 1 << 16)
        with suppress(ValueError, OverflowError):  # some dates are such that no file can have them
            os.utime(path, (member.info.mtime, member.info.mtime), follow_symlinks=False)


def _keep(draft: Path, path: Path) -> None:
    draft.replace(path)
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _disk_trouble(error: OSError) -> Unavailable:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = "the disk of the server is full" if full else os.strerror(error.errno or 0)
    return Unavailable(
        f"the snapshot could not be stored: {reason}", hint="try again when there is space" if full else ""
    )
