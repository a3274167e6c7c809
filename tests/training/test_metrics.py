"""metrics.jsonl and the progress line."""

import io
import json

import pytest
from rich.console import Console

from forebay.errors import CheckpointError
from forebay.training import metrics

pytestmark = pytest.mark.oldest


def row(step, loss=1.0):
    return metrics.StepMetrics(step=step, loss=loss, grad_norm=0.5, learning_rate=1e-3, step_seconds=0.25, tokens_per_second=4096.0)


def write(folder, steps, done=0, terminal=False):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with metrics.MetricsLog(folder, done=done, steps=10, console=console) as log:
        for step in steps:
            log.write(row(step))
    return out.getvalue()


def test_one_line_a_step_marked_as_measured(tmp_path):
    write(tmp_path, [1, 2])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[1] == {
        "step": 2, "loss": 1.0, "grad_norm": 0.5, "learning_rate": 1e-3, "step_seconds": 0.25, "tokens_per_second": 4096.0,
        "includes_compile": False, "kind": "measured",
    }  # fmt: skip
    assert len(rows) == 2


def test_steps_that_are_done_again_are_dropped(tmp_path):
    write(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a process killed while it wrote
    write(tmp_path, [3, 4], done=2)
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_loss_that_is_not_a_number_is_null():
    assert json.loads(row(1, float("nan")).to_json())["loss"] is None


def test_plain_lines_show_the_first_and_the_last_step(tmp_path):
    lines = write(tmp_path, range(1, 11)).splitlines()
    assert lines[0].startswith("step 1/10  loss 1.0000  grad norm 0.5  learning rate 1.00e-03  0.250 s/step  4,096 tokens/s  measured")
    assert lines[-1].startswith("step 10/10")
    assert len(lines) < 10


def test_a_terminal_gets_one_line_that_changes(tmp_path):
    shown = write(tmp_path, [1, 2], terminal=True)
    assert "step 1/10" in shown
    assert "step 2/10" in shown
    assert "\x1b[" in shown


def test_tensorboard_files_are_written_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    write(tmp_path, [1])
    assert len(list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))) == 1


def test_a_full_disk_is_said_with_the_step_and_the_way_on(tmp_path):
    with metrics.MetricsLog(tmp_path, done=0, steps=10, console=Console(file=io.StringIO())) as log:
        log.write(row(1))
        log._file.close()
        log._file = open("/dev/full", "w")  # noqa: SIM115  the log closes it
        with pytest.raises(CheckpointError, match=r"step 2 cannot be written to .*No space left on device.*go on with --resume"):
            log.write(row(2))
    write(tmp_path, [2], done=1)
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("line", ["5", "[]", '{"step": "two"}', '{"loss": 1.0}', '{"step": 2, "loss": NaN}', "[" * 5000])
def test_a_line_that_is_no_step_ends_what_is_read(tmp_path, line):
    write(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1]
