"""Tiers: what was written is what is read, on real files; what goes wrong is said in one line, and leaves nothing."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint import store
from meshwright.core.errors import InputError
from meshwright.core.offload import BLOCK_BYTES
from meshwright.parallel.offload.disk import DiskTier
from meshwright.parallel.offload.folder import SUFFIX, RankFolder
from meshwright.parallel.offload.tier import HostTier

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    made = HostTier(torch.device("cpu")) if request.param == "host" else DiskTier(tmp_path, 0)
    yield made
    made.close()


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("dtype", DTYPES)
def test_keeps_what_was_written(tier, dtype):
    x = torch.randn(5000).to(dtype)
    tier.allocate("moment1/0", 5000, dtype)
    tier.allocate("moment1/1", 3, dtype)
    tier.allocate("moment2/0", 5000, dtype)
    tier.write_start("moment1/0", 0, x).wait()
    tier.write_start("moment1/0", 4990, x[:10]).wait()
    out = torch.full((5000,), 7.0).to(dtype)
    tier.read_start("moment1/0", 0, out).wait()
    assert torch.equal(out, torch.cat([x[:4990], x[:10]]))
    for key, numel in (("moment1/1", 3), ("moment2/0", 5000)):
        tier.read_start(key, 0, out[:numel]).wait()
        assert not out[:numel].any(), "fresh memory is zero, and a write stays within its key"


def test_does_not_share_memory_with_what_it_was_given(tier):
    x = torch.ones(100)
    tier.allocate("master/0", 100, x.dtype)
    tier.write_start("master/0", 0, x).wait()
    x.zero_()
    out = torch.empty(100)
    tier.read_start("master/0", 0, out).wait()
    assert out.eq(1).all()


def test_a_read_sees_the_writes_started_before_it(tier):
    tier.allocate("master/0", 200_000, torch.float32)
    out = torch.empty(200_000)
    for value in range(20):
        written = tier.write_start("master/0", 0, torch.full((200_000,), float(value)))
        tier.read_start("master/0", 0, out).wait()
        written.wait()
        assert out.eq(value).all()


def test_counts_its_bytes(tier):
    tier.allocate("master/0", 1000, torch.float64)
    tier.allocate("moment1/0", 1000, torch.float32)
    tier.write_start("master/0", 0, torch.zeros(1000, dtype=torch.float64)).wait()
    tier.read_start("moment1/0", 10, torch.zeros(30)).wait()
    tier.read_start("moment1/0", 0, torch.zeros(0)).wait()
    taken = tier.take()
    assert (taken.read_bytes, taken.written_bytes) == (120, 8000)
    assert (taken.rows["moment1"].reads, taken.rows["master"].writes) == (1, 1)
    assert not tier.take().rows


def test_refuses_what_does_not_fit(tier):
    tier.allocate("master/0", 10, torch.float32)
    with pytest.raises(ValueError, match="leave its 10"):
        tier.read_start("master/0", 5, torch.zeros(6))
    with pytest.raises(ValueError, match="flat"):
        tier.write_start("master/0", 0, torch.zeros(6, dtype=torch.float64))
    with pytest.raises(ValueError, match="flat"):
        tier.write_start("master/0", 0, torch.zeros(12)[::2])
    with pytest.raises(ValueError, match="already"):
        tier.allocate("master/0", 10, torch.float32)


def test_one_file_per_kind_in_whole_blocks_taken_at_once(tmp_path):
    tier = DiskTier(tmp_path, 3)
    for name in range(3):
        tier.allocate(f"moment1/{name}", 1000, torch.bfloat16)
    tier.allocate("master/0", 1025, torch.float32)
    files = {file.name: file.stat() for file in tier.folder.glob("*.bin")}
    assert {name: found.st_size for name, found in files.items()} == {
        "moment1.bin": 3 * BLOCK_BYTES,
        "master.bin": 2 * BLOCK_BYTES,
    }
    assert all(found.st_blocks * 512 >= found.st_size for found in files.values()), "sparse: the disk may fill later"
    assert tier.held_bytes == 5 * BLOCK_BYTES
    tier.close()
    tier.close()
    assert not list(tmp_path.iterdir())


def test_transfers_run_in_threads_of_their_own(tmp_path):
    tier = DiskTier(tmp_path, 0)
    tier.allocate("master/0", 10, torch.float32)
    file, ran = tier._files["master"], []
    file.start(lambda buffer, offset: ran.append(threading.current_thread().name), memoryview(b""), 0).wait()
    assert ran[0].startswith("offload-master")
    tier.close()


def test_files_go_with_the_object(tmp_path):
    tier = DiskTier(tmp_path, 0)
    tier.allocate("master/0", 10, torch.float32)
    del tier
    assert not list(tmp_path.iterdir())


def test_more_than_the_disk_has_is_refused_before_it_is_taken(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 0)
    tier.allocate("moment1/0", 1000, torch.float32)
    needed = 2**62
    monkeypatch.setattr(os, "posix_fallocate", lambda *args: pytest.fail("the disk would be full for everybody"))
    with pytest.raises(InputError) as error:
        tier.allocate("moment2/0", needed // 8, torch.float64)
    text = one_line(error)
    found = os.statvfs(tmp_path)
    free = next(int(word) for word in text.split() if word.isdigit() and int(word) not in (0, needed))
    assert str(needed) in text
    assert abs(free - found.f_bavail * found.f_frsize) < 2**30
    assert not list(tmp_path.iterdir()), "nothing is left half done"


def test_space_that_goes_while_it_is_taken(tmp_path, monkeypatch):
    """Another program may take what was free a moment ago."""

    def full(descriptor, offset, length):
        os.pwrite(descriptor, b"x" * (length // 2), offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = DiskTier(tmp_path, 0)
    tier.allocate("moment1/0", 1000, torch.float32)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match="the disk is full: rank 0 needs 8192 more bytes for moment2/0"):
        tier.allocate("moment2/0", 2000, torch.float32)
    assert not list(tmp_path.iterdir())


FILL = """
import sys, torch
from meshwright.core.errors import InputError
from meshwright.parallel.offload.disk import DiskTier
tier = DiskTier(sys.argv[1], 0)
try:
    for name in range(100):
        tier.allocate(f"moment1/{name}", 25_000, torch.float32)
except InputError as error:
    print(name, error)
import os
print(os.listdir(sys.argv[1]))
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of one mebibyte."""
    inside = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "{sys.executable}" -c \'{FILL}\' "{tmp_path}"'
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*enter, f'mount -t tmpfs none "{tmp_path}"'], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    done = subprocess.run([*enter, inside], capture_output=True, text=True, timeout=120)
    first, left = done.stdout.splitlines()
    assert first.startswith("10 ")
    assert "disk is full" in first
    assert "102400 more bytes" in first
    assert left == "[]"


def test_a_path_that_is_missing(tmp_path):
    with pytest.raises(InputError, match="no such folder") as error:
        DiskTier(tmp_path / "nvme", 0)
    one_line(error)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "nvme").touch()
    with pytest.raises(InputError, match="is not a folder"):
        DiskTier(tmp_path / "nvme", 0)


def test_a_path_that_cannot_be_written_to(tmp_path, monkeypatch):
    def read_only(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(InputError, match="cannot be offloaded to: Read-only file system") as error:
        DiskTier(tmp_path, 0)
    one_line(error)


def test_a_read_that_fails_is_one_line(tmp_path):
    tier = DiskTier(tmp_path, 0)
    tier.allocate("moment1/0", 10_000, torch.float32)
    os.truncate(tier.folder / "moment1.bin", 100)
    with pytest.raises(InputError, match=r"moment1\.bin: the disk tier failed: it ends at byte 100") as error:
        tier.read_start("moment1/0", 0, torch.empty(10_000)).wait()
    one_line(error)
    tier.close()


def test_ranks_share_a_folder_and_runs_do_not(tmp_path):
    first, second = DiskTier(tmp_path, 0), DiskTier(tmp_path, 1)
    with pytest.raises(InputError, match=f"in use by process {os.getpid()} on .*; two runs") as error:
        DiskTier(tmp_path, 1, patience_s=0.1)
    one_line(error)
    assert second.folder.is_dir(), "who is refused removes nothing"
    second.close()
    DiskTier(tmp_path, 1).close()
    first.close()


def test_many_starters_at_once_find_each_other(tmp_path):
    """Each sweeps what the others are just making, and none is lost."""
    for rank in range(16):
        dead = tmp_path / f"rank-{rank:05d}{SUFFIX}"
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "master.bin").write_bytes(b"x" * 100)
    folders: dict[int, RankFolder] = {}

    def begin(rank):
        folders[rank] = RankFolder(tmp_path, rank)

    starters = [threading.Thread(target=begin, args=(rank,)) for rank in range(8)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert sorted(folders) == list(range(8))
    assert sorted(tmp_path.glob("*/*")) == [folders[rank].path / "lock" for rank in range(8)]
    for folder in folders.values():
        folder.close()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """A sweeper may remove the very file that a starter has just opened."""
    flock, removed = fcntl.flock, []

    def late(descriptor, how):
        if not removed:
            removed.append(next(tmp_path.glob("*/lock")))
            removed[0].unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    folder = RankFolder(tmp_path, 0)
    with pytest.raises(InputError, match="in use"):
        RankFolder(tmp_path, 0, patience_s=0.1)
    folder.close()
    assert not list(tmp_path.iterdir())


RUN = """
import sys, torch
from meshwright.parallel.offload.disk import DiskTier
tier = DiskTier(sys.argv[1], int(sys.argv[2]))
tier.allocate("moment1/0", 100_000, torch.float32)
print(tier.folder, flush=True)
while True:
    tier.write_start("moment1/0", 0, torch.ones(100_000)).wait()
"""


@pytest.mark.parametrize("rank", [0, 5])
def test_files_of_a_killed_run_are_nobodys(tmp_path, rank):
    """While it lives they are locked; once it is killed in the middle of a write, the next start removes them, also
    where it has fewer ranks; they are never taken for a checkpoint."""
    store.save(tmp_path, 3, [], {"kept": True})
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), str(rank)], stdout=subprocess.PIPE, text=True)
    try:
        folder = Path(process.stdout.readline().strip())
        with pytest.raises(InputError, match=f"in use by process {process.pid} "):
            DiskTier(tmp_path, rank, patience_s=0.1)
        DiskTier(tmp_path, 1).close()
        assert (folder / "moment1.bin").stat().st_size >= 400_000, "another rank's start leaves the living alone"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert (folder / "moment1.bin").exists()
    assert store.latest(tmp_path) == 3
    tier = DiskTier(tmp_path, 0)
    assert [path.name for path in tmp_path.glob(f"*{SUFFIX}/*")] == ["lock"]
    tier.allocate("moment1/0", 100_000, torch.float32)
    out = torch.ones(100_000)
    tier.read_start("moment1/0", 0, out).wait()
    assert not out.any()
    tier.close()
    assert store.peek(tmp_path)["kept"]
