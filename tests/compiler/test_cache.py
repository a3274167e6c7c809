"""The cache: hits without a worker, keys, damage, folders that cannot be used, and eviction."""

import errno
import hashlib
import os

import jax
import jax.numpy as jnp
import pytest

from forebay.compiler import cache, judge, judging, pool
from forebay.compiler.outcome import COMPILED, Outcome

pytestmark = [pytest.mark.oldest, pytest.mark.compiler]
ARGS = (jax.ShapeDtypeStruct((64, 64), jnp.float32),)


def double(x):
    return x @ x + 1


@pytest.fixture
def no_worker(monkeypatch):
    def refuse(*_):
        raise AssertionError("a worker was asked")

    return lambda: monkeypatch.setattr(judging, "compile_in_worker", refuse)


def test_the_second_time_no_worker_is_asked_and_the_answer_is_the_same(hardware, no_worker):
    first = judge(double, ARGS, hardware)
    no_worker()
    second = judge(double, ARGS, hardware)
    assert (first.cached, second.cached) == (False, True)
    assert second.hlo == first.hlo
    assert second.to_json() | {"cached": False} == first.to_json()


def test_a_refusal_is_kept_too(hardware, no_worker):
    options = {"xla_gpu_no_such_option": 1}
    first = judge(double, ARGS, hardware, compiler_options=options)
    no_worker()
    assert judge(double, ARGS, hardware, compiler_options=options).reason == first.reason


def test_a_function_moved_in_its_file_is_the_same_program_and_another_option_is_not(hardware, no_worker):
    first = judge(double, ARGS, hardware)
    moved = {}
    exec(compile("\n" * 30 + "def double(x):\n    return x @ x + 1", "elsewhere.py", "exec"), moved)
    no_worker()
    assert judge(moved["double"], ARGS, hardware).fingerprint == first.fingerprint
    with pytest.raises(AssertionError, match="a worker was asked"):
        judge(double, ARGS, hardware, compiler_options={"xla_gpu_memory_limit_slop_factor": 90})
    with pytest.raises(AssertionError, match="a worker was asked"):
        judge(lambda x: x @ x + 2, ARGS, hardware)


DAMAGE = {
    "cut": lambda data: data[:-5],
    "shifted": lambda data: b"\x00" + data,
    "emptied": lambda data: b"",
    "overwritten": lambda data: data[:200] + b"x" + data[201:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_compiled_again_and_said(hardware, cache_folder, damage):
    first = judge(double, ARGS, hardware)
    (entry,) = cache_folder.glob("*.verdict")
    entry.write_bytes(damage(entry.read_bytes()))
    again = judge(double, ARGS, hardware)
    assert not again.cached
    assert again.hbm == first.hbm
    assert any("was damaged" in message for message in again.messages)
    assert judge(double, ARGS, hardware).cached


def test_an_entry_of_another_version_is_compiled_again_and_said(hardware, cache_folder):
    """Whole by its checksum, and yet not what this version keeps."""
    judge(double, ARGS, hardware)
    (entry,) = cache_folder.glob("*.verdict")
    for body in (b'{"status": "compiled", "colour": "red"}', b'{"status": 5}', b"[" * 5000, b"[]"):
        entry.write_bytes(hashlib.sha256(body + b"\nhlo").hexdigest().encode() + b" " + body + b"\nhlo")
        again = judge(double, ARGS, hardware)
        assert again.fits and not again.cached
        assert any("was damaged" in message for message in again.messages)


def test_a_folder_that_cannot_be_used_is_said_and_worked_without(hardware, tmp_path, monkeypatch):
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("FOREBAY_CACHE", str(file))
    verdict = judge(double, ARGS, hardware)
    assert verdict.fits
    assert any("cannot be written" in message and "set FOREBAY_CACHE" in message for message in verdict.messages)


def test_a_full_disk_leaves_no_piece_behind(cache_folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    said = cache.write("key", Outcome(status=COMPILED, hlo_gzip=b"x"))
    assert "No space left on device" in said[0]
    assert list(cache_folder.iterdir()) == []


def test_the_least_recently_used_entries_go_first(cache_folder, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT_BYTES", 4000)
    for number in range(3):
        cache.write(f"key{number}", Outcome(status=COMPILED, hlo_gzip=b"x" * 1000))
        os.utime(cache_folder / f"key{number}.verdict", (number, number))
    assert cache.read("key0")[0] is not None  # now the most recently used
    cache.write("key3", Outcome(status=COMPILED, hlo_gzip=b"x" * 1000))
    assert sorted(path.stem for path in cache_folder.iterdir()) == ["key0", "key3"]


def test_cache_false_neither_reads_nor_writes(hardware, cache_folder):
    judge(double, ARGS, hardware, cache=False)
    assert not cache_folder.exists()


def test_a_cached_answer_starts_no_process(hardware):
    judge(double, ARGS, hardware)
    pool.close_workers()
    assert judge(double, ARGS, hardware).cached
    assert not any(pool._idle.values())
