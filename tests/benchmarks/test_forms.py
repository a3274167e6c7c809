"""The table of forms at a small size: it runs on both targets, the order of its rows is the promised one, and its record can be read."""

import importlib
import json

import pytest

SMALL = {"layers": 4, "model": 256, "mlp": 512, "tokens": 128, "deep_layers": 4, "deep_model": 256, "deep_tokens": 1024}


@pytest.mark.compiler
@pytest.mark.parametrize("machine", ["h100-sxm", "tpu-v5p:1x1x1"])
def test_forebay_needs_less_than_resident_and_naive(machine, tmp_path):
    forms, record = importlib.import_module("forms"), importlib.import_module("record")
    rows, versions = forms.measure(machine, forms.Size(**SMALL))
    for theme in forms.THEMES:
        ours = [r for r in rows if r.theme == theme and r.form.startswith("forebay")]
        others = [r for r in rows if r.theme == theme and r not in ours]
        assert all(r.hbm_bytes for r in ours), theme
        # its leanest form: at this size the slices of copies both ways at once are as large as the state
        assert min(r.hbm_bytes for r in ours) < min(r.hbm_bytes for r in others), theme
        assert all(r.host_to_host_in_loops == 0 for r in ours), theme
        assert not any(r.facts["in_place"] and r.host_temp_bytes for r in ours), theme
    record.show("forms", rows, 2**20, "MiB")
    kept = json.loads(record.keep("forms", machine, rows, versions, tmp_path).read_text())
    assert len(kept["rows"]) == len(rows)
    assert kept["versions"]["jaxlib"]


def test_a_table_says_which_row_misses_its_bound(capsys):
    record = importlib.import_module("record")
    common = {"target": "", "hbm_temp_bytes": 0, "host_bytes": 0, "host_temp_bytes": 0, "host_to_host_in_loops": 0}
    common |= {"compile_seconds": 0.0, "fits": True, "reason": ""}
    rows = [record.Row(theme="t", form=str(n), hbm_bytes=n, bound_bytes=2, **common) for n in (1, 3)]
    record.show("table", rows, 1, "B")
    said = capsys.readouterr().out
    assert "2.00 yes" in said
    assert "2.00 NO" in said
