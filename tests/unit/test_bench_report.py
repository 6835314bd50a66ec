import json
import sys

from rich.console import Console

from tiered_kv.bench.report import Result, compared, table, write


def test_a_ratio_is_held_against_its_bar():
    assert compared("a", 8.6, "GB/s", "raw", 10.0, bar=0.85).holds is True
    low = compared("a", 8.0, "GB/s", "raw", 10.0, bar=0.85)
    assert (low.ratio, low.bar, low.holds) == (0.8, 0.85, False)
    assert compared("a", 8.0, "GB/s", "raw", 10.0).holds is None


def test_small_values_hold_below_their_bar():
    assert compared("p50", 2.0, "ms", "cold", 10.0, bar=0.3, at_most=True).holds is True
    assert compared("p50", 4.0, "ms", "cold", 10.0, bar=0.3, at_most=True).holds is False


def test_a_ratio_of_pairs_is_taken_as_it_is():
    assert compared("a", 8.0, "GB/s", "raw", 10.0, ratio=0.9, bar=0.85).holds is True


def test_nothing_can_be_compared_with_zero():
    result = compared("a", 8.0, "GB/s", "raw", 0.0, bar=0.85)
    assert (result.ratio, result.holds) == (None, None)


def test_the_file_has_one_form(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/tiered-kv", "bench", "io", "--folder", "a b"])
    results = [compared("a", 8.0, "GB/s", "raw", 10.0, bar=0.75), Result("b", 1.0, "s")]
    write(tmp_path / "new" / "r.json", results, {"cores": 2})
    report = json.loads((tmp_path / "new" / "r.json").read_text())
    assert report["machine"] == {"cores": 2}
    assert report["command"] == "tiered-kv bench io --folder 'a b'"
    assert report["date"].endswith("+00:00")
    assert report["results"] == [
        {
            "name": "a",
            "value": 8.0,
            "unit": "GB/s",
            "against": "raw",
            "against_value": 10.0,
            "ratio": 0.8,
            "bar": 0.75,
            "holds": True,
        },
        {
            "name": "b",
            "value": 1.0,
            "unit": "s",
            "against": "",
            "against_value": None,
            "ratio": None,
            "bar": None,
            "holds": None,
        },
    ]


def test_the_table_marks_what_misses_its_bar():
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    results = [
        compared("good", 9.0, "GB/s", "raw", 10.0, bar=0.85),
        compared("bad", 8.0, "GB/s", "raw", 10.0, bar=0.85),
        compared("free", 8.0, "GB/s", "raw", 10.0),
    ]
    table(results, console)
    console.file.close()
    lines = {line.split()[1]: line for line in console.export_text().splitlines()[3:-1]}
    assert "yes" in lines["good"]
    assert "NO" in lines["bad"]
    assert "NO" not in lines["free"]
    assert "yes" not in lines["free"]
