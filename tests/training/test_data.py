"""Text as batches: exact, complete, the same after a resume, and refused with one clear sentence where it is not text."""

import numpy as np
import pytest

from forebay.errors import InputError
from forebay.training import data
from forebay.training.order import permuted

pytestmark = pytest.mark.oldest


def write(folder, **files):
    for name, text in files.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def test_the_stream_is_the_files_each_closed_by_a_nul(tmp_path):
    corpus = data.open_corpus([write(tmp_path, a="hello", b="wörld", c="!")])
    stream = corpus.read(0, corpus.length).tobytes()
    assert stream.endswith(b"\0")
    assert sorted(stream[:-1].split(b"\0")) == sorted([b"hello", "wörld".encode(), b"!"])
    for start in range(corpus.length):
        for stop in range(start, corpus.length):
            assert corpus.read(start, stop).tobytes() == stream[start:stop]


def test_an_epoch_reads_every_window_once(tmp_path):
    corpus = data.open_corpus([write(tmp_path, a=bytes(range(1, 128))) + "/a"])  # 128 tokens, each another one
    train, _ = data.split(corpus, batch=3, seq=5, validation_fraction=0)
    assert train.windows == (128 - 5) // 5
    for epoch in range(3):
        first = np.concatenate([train.tokens(epoch * train.windows // 3 + step)[:, 0] for step in range(train.windows // 3)])
        assert len(first) == 24
        assert (np.diff(np.sort(first % 128)) == 5).all()  # windows follow each other without a gap


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 1000])
def test_a_permutation_is_one(count):
    sent = permuted(np.arange(count), count, key=7)
    assert sorted(sent.tolist()) == list(range(count))
    assert count < 64 or (sent != permuted(np.arange(count), count, key=8)).any()


def test_a_step_is_the_same_for_ever_and_rows_are_a_part_of_it(tmp_path):
    corpus = data.open_corpus([write(tmp_path, a="the quick brown fox " * 40)])
    train, validation = data.split(corpus, batch=4, seq=16, seed=5)
    again, _ = data.split(data.open_corpus([str(tmp_path)]), batch=4, seq=16, seed=5)
    other, _ = data.split(corpus, batch=4, seq=16, seed=6)
    assert train.tokens(11).shape == (4, 17)
    assert train.tokens(11).dtype == np.int32
    np.testing.assert_array_equal(train.tokens(11), again.tokens(11))
    np.testing.assert_array_equal(train.tokens(11)[1:3], again.tokens(11, slice(1, 3)))
    assert any((train.tokens(step) != other.tokens(step)).any() for step in range(3))
    assert validation.start == train.stop


def test_the_standard_library_is_there_by_default():
    corpus = data.open_corpus()
    assert corpus.length > 2**20
    assert all(file.endswith(".py") and "site-packages" not in file for file in corpus.files)
    assert corpus.fingerprint == data.open_corpus().fingerprint


def test_folders_skip_hidden_files_and_patterns_work(tmp_path):
    write(tmp_path, **{"a.txt": "text", ".hidden": b"\0", "b.bin": b"\0"})
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", **{"c.txt": "more"})
    assert len(data.open_corpus([f"{tmp_path}/**/*.txt"]).files) == 2
    with pytest.raises(InputError, match=r"b\.bin, one of the 3 files of .*, is not text: byte 0 is NUL; name the text alone"):
        data.open_corpus([str(tmp_path)])


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "none.txt", "there is no file or folder"),
        ({}, "", "holds no file to train on"),
        ({"a": ""}, "a", "is empty"),
        ({}, "*.txt", "no file matches the pattern"),
        ({"a": b"text\0more"}, "a", "is not text: byte 4 is NUL"),
        ({"a": "é".encode("latin-1") + b" text"}, "a", "is not text: byte 0 (0xe9) is not UTF-8"),
        ({"a": b"x" * 200_000 + b"\xff"}, "a", "is not text: byte 200000 (0xff) is not UTF-8"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, files, path, message):
    write(tmp_path, **files)
    with pytest.raises(InputError) as caught:
        data.open_corpus([str(tmp_path / path)])
    assert message in str(caught.value)


def test_characters_cut_by_the_probe_are_text(tmp_path):
    write(tmp_path, a="x" + "é" * 150_000, b="xx" + "語" * 100_000)
    assert data.open_corpus([str(tmp_path)]).length == 300_001 + 300_002 + 2


def test_a_file_shorter_than_a_sequence_is_refused_with_numbers(tmp_path):
    corpus = data.open_corpus([write(tmp_path, a="x" * 99)])
    with pytest.raises(InputError, match=r"holds 95 bytes to train on \(of 100\), and one sequence of --seq 128 needs 129.*at most 94"):
        data.split(corpus, batch=1, seq=128)


def test_a_file_that_shrinks_during_the_run_is_named(tmp_path):
    corpus = data.open_corpus([write(tmp_path, a="x" * 99)])
    write(tmp_path, a="x" * 50)
    with pytest.raises(InputError, match="49 bytes shorter than when the run began"):
        corpus.read(0, 99)


def test_a_vocabulary_that_is_too_small_is_refused():
    data.check_vocabulary(256, "tiny")
    with pytest.raises(InputError, match="the model small has a vocabulary of 100 and text as bytes needs 256"):
        data.check_vocabulary(100, "small")


def test_unigram_entropy_of_known_texts(tmp_path):
    corpus = data.open_corpus([write(tmp_path, a="ab" * 5000)])
    train, _ = data.split(corpus, batch=1, seq=8)
    assert data.unigram_entropy_nats(train) == pytest.approx(np.log(2), abs=1e-3)
