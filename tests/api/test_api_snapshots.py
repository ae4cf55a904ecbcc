"""Snapshots: an honest folder comes back as it was; an archive that reaches outside is refused before it is stored."""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from thebes.client_snapshot import pack
from thebes.live import snapshots as snapshots_module
from thebes.live.errors import Invalid, NotFound, TooLarge, Unavailable
from thebes.live.limits import Limits
from thebes.live.snapshots import Snapshots
from thebes.model.errors import UserError


async def in_blocks(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def receive(snapshots: Snapshots, data: bytes, expected: str | None = None) -> str:
    return asyncio.run(snapshots.receive(in_blocks(data), expected))[0]


def entry(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", link: str = "", mode: int = 0o644):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode = kind, len(content), link, mode
    return info, content


def packed(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for info, content in entries:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def raw_header(name: bytes, size_field: bytes, kind: bytes = b"0") -> bytes:
    """A tar header with a size that tarfile would never write."""
    block = bytearray(512)
    block[0 : len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = size_field
    block[156:157] = kind
    block[257:265] = b"ustar\00000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "instance"


@pytest.fixture
def snapshots(folder: Path) -> Snapshots:
    return Snapshots(folder)


def files_below(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*")) if path.exists() else []


class TestHonest:
    @pytest.fixture
    def work(self, tmp_path: Path) -> Path:
        work = tmp_path / "work"
        (work / "src/deep").mkdir(parents=True)
        (work / "src/deep/train.py").write_text("print('hello')\n")
        (work / "run.sh").write_text("#!/bin/sh\n")
        (work / "run.sh").chmod(0o755)
        (work / "latest").symlink_to("src/deep")
        (work / "src/up").symlink_to("../run.sh")
        (work / "empty").mkdir()
        (work / "same.sh").hardlink_to(work / "run.sh")
        return work

    def test_folder_comes_back_as_it_was(self, work: Path, snapshots: Snapshots) -> None:
        archive, digest = pack(work)
        assert receive(snapshots, archive.read_bytes(), digest) == digest
        unpacked = snapshots.unpack(digest, "17")
        assert files_below(unpacked) == files_below(work)
        assert (unpacked / "latest/train.py").read_text() == "print('hello')\n"
        assert os.access(unpacked / "run.sh", os.X_OK)
        assert (unpacked / "run.sh").stat().st_mtime == int((work / "run.sh").stat().st_mtime)
        assert unpacked.stat().st_mode & 0o077 == 0

    def test_same_folder_same_digest(self, work: Path) -> None:
        assert pack(work)[1] == pack(work)[1]

    def test_later_edits_change_nothing(self, work: Path, snapshots: Snapshots) -> None:
        archive, digest = pack(work)
        receive(snapshots, archive.read_bytes())
        (work / "src/deep/train.py").write_text("print('edited')\n")
        assert "hello" in (snapshots.unpack(digest, "17_3") / "src/deep/train.py").read_text()

    def test_unpacking_twice_keeps_what_the_job_wrote(self, work: Path, snapshots: Snapshots) -> None:
        digest = receive(snapshots, pack(work)[0].read_bytes())
        (snapshots.unpack(digest, "17") / "result").write_text("42")
        assert (snapshots.unpack(digest, "17") / "result").read_text() == "42"

    def test_left_out(self, work: Path, snapshots: Snapshots) -> None:
        (work / ".git").mkdir()
        (work / ".git/config").write_text("secret")
        (work / "data").mkdir()
        (work / "data/huge.bin").write_text("x")
        (work / "a.ckpt").write_text("x")
        (work / "outside").symlink_to("/etc/passwd")
        os.mkfifo(work / "pipe")
        (work / ".thebesignore").write_text("# not needed\ndata/\n*.ckpt\n")
        found = files_below(snapshots.unpack(receive(snapshots, pack(work)[0].read_bytes()), "1"))
        assert not {".git", "data", "a.ckpt", "outside", "pipe"} & set(found)
        assert "run.sh" in found

    def test_too_large_to_pack(self, work: Path) -> None:
        (work / "noise").write_bytes(os.urandom(300_000))
        with pytest.raises(UserError, match="too large") as caught:
            pack(work, limit_bytes=100_000)
        assert ".thebesignore" in caught.value.hint

    def test_not_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="not a folder"):
            pack(tmp_path / "nowhere")

    def test_pruning_keeps_what_is_named_and_what_is_new(self, work: Path, snapshots: Snapshots) -> None:
        first = receive(snapshots, pack(work)[0].read_bytes())
        (work / "more").write_text("x")
        second = receive(snapshots, pack(work)[0].read_bytes())
        assert snapshots.prune({first}) == 0
        assert not snapshots.any_older()
        assert snapshots.prune({first}, older_than_s=-1.0) == 1
        assert snapshots.has(first)
        assert not snapshots.has(second)


LINK, HARD, DEVICE, FIFO = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE
ATTACKS = {
    "absolute": [entry("/etc/evil", content=b"x")],
    "up": [entry("../evil", content=b"x")],
    "up in the middle": [entry("a/../../evil", content=b"x")],
    "absolute link": [entry("a", LINK, link="/etc/passwd")],
    "link up": [entry("a", LINK, link="../outside")],
    "link up from below": [entry("d/a", LINK, link="../../outside")],
    "link through another": [entry("d/up", LINK, link=".."), entry("out", LINK, link="d/up/../..")],
    "file through a link": [entry("a", LINK, link="."), entry("a/evil", content=b"x")],
    "folder through a link": [entry("a", LINK, link="b"), entry("a/b", tarfile.DIRTYPE)],
    "link replaced by file": [entry("a", LINK, link="b"), entry("a", content=b"x")],
    "folder replaced by link": [entry("a", tarfile.DIRTYPE), entry("a", LINK, link="b")],
    "implied folder replaced by link": [entry("a/b", content=b"x"), entry("a", LINK, link="c")],
    "twice": [entry("a", content=b"1"), entry("a", content=b"2")],
    "file below a file": [entry("a", content=b"1"), entry("a/b", content=b"2")],
    "hard link outside": [entry("a", HARD, link="/etc/passwd")],
    "hard link up": [entry("a", HARD, link="../x")],
    "hard link to nothing": [entry("a", HARD, link="b")],
    "hard link to a link": [entry("s", LINK, link="b"), entry("a", HARD, link="s")],
    "device": [entry("a", DEVICE)],
    "block device": [entry("a", tarfile.BLKTYPE)],
    "pipe": [entry("a", FIFO)],
    "long part": [entry("a" * 300, content=b"x")],
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_archive_that_reaches_outside_is_refused(name: str, snapshots: Snapshots, folder: Path) -> None:
    with pytest.raises(Invalid, match="snapshot may not hold") as caught:
        receive(snapshots, packed(entry("good.py", content=b"fine"), *ATTACKS[name]))
    assert "root" not in str(caught.value)
    assert files_below(folder) == ["snapshots"]


@pytest.mark.parametrize("name", ATTACKS)
def test_it_is_refused_again_when_unpacked(name: str, snapshots: Snapshots, folder: Path) -> None:
    data = packed(entry("good.py", content=b"fine"), *ATTACKS[name])
    digest = hashlib.sha256(data).hexdigest()
    snapshots.folder.mkdir(parents=True)
    snapshots.path(digest).write_bytes(data)
    with pytest.raises(Invalid):
        snapshots.unpack(digest, "17")
    assert files_below(folder / "jobs") == ["17"]
    assert not (folder.parent / "outside").exists()
    assert not (folder.parent / "evil").exists()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "not gzip": lambda _: b"hello" * 1000,
    "gzip of noise": lambda _: gzip.compress(os.urandom(5000)),
    "cut off": lambda data: data[: len(data) // 2],
    "negative size": lambda _: gzip.compress(raw_header(b"a", b"\xff" * 12) + b"\0" * 1024),
    "huge header": lambda _: gzip.compress(raw_header(b"a", b"00040000000\0", b"x") + b"0" * (9 << 20)),
    "huge long name": lambda _: gzip.compress(raw_header(b"a", b"77777777777\0", b"L") + b"0" * (9 << 20)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_archives(name: str, snapshots: Snapshots, folder: Path) -> None:
    honest = packed(*(entry(f"f{i}", content=os.urandom(2000)) for i in range(20)))
    with pytest.raises(Invalid, match=r"not a sound \.tar\.gz|may not hold"):
        receive(snapshots, DAMAGE[name](honest))
    assert files_below(folder) == ["snapshots"]


def test_bomb(folder: Path) -> None:
    snapshots = Snapshots(folder, Limits(unpacked_bytes=5 << 20))
    data = packed(entry("zeros", content=bytes(20 << 20)))
    assert len(data) < 100_000
    with pytest.raises(Invalid, match="larger than 5 MiB when unpacked"):
        receive(snapshots, data)


def test_too_large_is_noticed_while_it_arrives(folder: Path) -> None:
    snapshots = Snapshots(folder, Limits(snapshot_bytes=1 << 20))
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 1 << 16
            yield bytes(1 << 16)

    with pytest.raises(TooLarge, match="larger than 1 MiB"):
        asyncio.run(snapshots.receive(endless()))
    assert taken <= (1 << 20) + (1 << 17)
    assert files_below(folder) == ["snapshots"]


def test_wrong_digest(snapshots: Snapshots, folder: Path) -> None:
    with pytest.raises(Invalid, match="damaged"):
        receive(snapshots, packed(entry("a", content=b"x")), "0" * 64)
    assert files_below(folder) == ["snapshots"]


@pytest.mark.parametrize("digest", ["../../etc/passwd", "", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_only_a_digest_names_a_file(digest: str, snapshots: Snapshots) -> None:
    with pytest.raises(Invalid):
        snapshots.path(digest)


@pytest.mark.parametrize("job_id", ["../17", "17/..", "", "17_", "a", "17\n"])
def test_only_a_job_id_names_a_folder(job_id: str, snapshots: Snapshots) -> None:
    with pytest.raises(Invalid):
        snapshots.unpack("0" * 64, job_id)


def test_unpacking_what_is_not_there(snapshots: Snapshots, folder: Path) -> None:
    with pytest.raises(NotFound, match="upload it again"):
        snapshots.unpack("0" * 64, "17")
    assert files_below(folder / "jobs") == ["17"]


def test_the_folder_itself_may_be_named(snapshots: Snapshots) -> None:
    """As `tar c .` writes it."""
    digest = receive(snapshots, packed(entry(".", tarfile.DIRTYPE), entry("./train.py", content=b"x")))
    assert files_below(snapshots.unpack(digest, "17")) == ["train.py"]


def test_too_many_entries(snapshots: Snapshots, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "MAX_MEMBERS", 5)
    receive(snapshots, packed(*(entry(f"f{i}") for i in range(5))))
    with pytest.raises(Invalid, match="the snapshot has more than 5 entries"):
        receive(snapshots, packed(*(entry(f"g{i}") for i in range(6))))
    assert len(files_below(folder / "snapshots")) == 1


def test_a_full_disk_is_told_with_what_to_do(
    snapshots: Snapshots, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(Unavailable, match="could not be stored: the disk of the server is full") as told:
            receive(snapshots, packed(entry("a", content=b"x")))
    assert told.value.hint == "try again when there is space"
    assert files_below(folder) == ["snapshots"]  # half an upload takes no space either
    assert snapshots.has(receive(snapshots, packed(entry("a", content=b"x"))))


def test_a_folder_that_cannot_be_made_is_told(snapshots: Snapshots, folder: Path) -> None:
    digest = receive(snapshots, packed(entry("a", content=b"x")))
    (folder / "jobs").write_text("a file is in the way")
    with pytest.raises(Unavailable, match="could not be stored: Not a directory"):
        snapshots.unpack(digest, "17")
    shutil.rmtree(folder)
    folder.write_text("here, too")
    with pytest.raises(Unavailable, match="could not be stored: "):
        receive(snapshots, packed(entry("b", content=b"x")))


def test_a_folder_that_goes_while_it_is_filled_is_not_the_archives_fault(snapshots: Snapshots, folder: Path) -> None:
    digest = receive(snapshots, packed(entry("a", content=b"x")))
    (folder / "jobs").symlink_to(folder / "elsewhere" / "unmounted")
    with pytest.raises(Unavailable, match="could not be stored: "):
        snapshots.unpack(digest, "17")
    assert snapshots.has(digest)


def test_what_git_ignores_is_left_out(tmp_path):
    import subprocess
    import tarfile

    from thebes.client_snapshot import pack

    for name in ("train.py", "data/big.bin", "notes.log", "src/keep.log.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".gitignore").write_text("data/\n*.log\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    packed, _ = pack(tmp_path)
    with tarfile.open(packed) as archive:
        assert sorted(archive.getnames()) == [".gitignore", "src", "src/keep.log.py", "train.py"]
    packed.unlink()
