"""`tfdistkit doctor --links`: what each way to send would take over a link, and links of this machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tfdistkit.cli import doctor
from tfdistkit.doctor import own_links
from tfdistkit.doctor.estimates import choices, estimate
from tfdistkit.doctor.network import Link

GIGABIT = Link("h2 -> h1", 125e6, 0.0002)
SLOW = Link("h3 -> h1", 12.5e6, 0.01)


def test_bytes_are_those_that_workers_send() -> None:
    """As measured at interfaces: benchmarks/compression.py."""
    sizes = {one.name: one.size_bytes for one in choices(1_000_000, 2)}
    assert sizes["none"] == 4e6 and sizes["fp16"] == 2e6
    assert sizes["ByteGrad()"] == pytest.approx(1e6 * (1 + 8 / 512))
    assert sizes["TopK(0.01)"] == pytest.approx(80_000)
    assert sizes["LocalSGD(100)"] == pytest.approx(120_000) and sizes["DiLoCo(500)"] == pytest.approx(8_000)
    of_four = {one.name: one.size_bytes for one in choices(1_000_000, 4)}
    assert of_four["none"] == 6e6 and of_four["TopK(0.01)"] == pytest.approx(240_000)


def test_time_has_bytes_and_round_trips() -> None:
    none, *_ = choices(25_000_000, 2)
    assert none.seconds(GIGABIT) == pytest.approx(0.8 + 2 * 0.0001)
    assert choices(0, 3)[0].seconds(SLOW) == pytest.approx(4 * 0.005)


@pytest.mark.parametrize(
    ("parameters", "step_s", "expected"),
    [
        (25_000_000, 60, "no compression"),
        (25_000_000, 30, 'compression="fp16"'),
        (25_000_000, 10, "ByteGrad()"),
        (25_000_000, 1.0, "PowerSGD(rank=4)"),
        (25_000_000, 0.12, "DiLoCo(every=500)"),
        (25_000_000, 0.01, "no way leaves 80 %"),
    ],
)
def test_the_most_exact_way_that_is_fast_enough(parameters: int, step_s: float, expected: str) -> None:
    """Over the slowest of the links."""
    about, *_, recommended = estimate(parameters, 2, step_s, [GIGABIT, SLOW])
    assert "h3 -> h1: 0.10 Gbit/s, 10.00 ms round trip" in about.text
    assert expected in recommended.text, recommended


def test_links_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--links", "--parameters", "2e6", "--step-ms", "50", "--json"]) == 0
    found = {(one["topic"], one["name"]): one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert {name for topic, name in found if topic == "links"} == {"loopback", "shared memory"}
    assert found["estimates", "for"]["text"].startswith(
        "2,000,000 weights, 2 workers, steps that compute 50 ms; shared"
    )
    assert found["estimates", "recommended"]["text"].startswith("no compression")


def test_loopback_that_does_not_work_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_links, "_LOOPBACK", "192.0.2.1")  # an address that no machine has (RFC 5737)
    assert doctor.main(["--links"]) == 1
    assert "loopback: Check the loopback interface" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--parameters", "5"], "need --links"),
        (["--step-ms", "5", "--no-trials"], "need --links"),
        (["--links", "--parameters", "0"], "expected a number of weights"),
        (["--links", "--parameters", "1.5"], "expected a number of weights"),
        (["--links", "--parameters", "inf"], "expected a number of weights"),
        (["--links", "--step-ms", "nan"], "expected milliseconds"),
        (["--links", "--strategy", "mirrored"], "not allowed with"),
    ],
)
def test_wrong_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(words)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_it_loads_no_tensorflow() -> None:
    code = (
        "import sys; from tfdistkit.cli import doctor; doctor.main(['--links']); sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0
