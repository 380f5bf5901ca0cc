"""The tables of GPUs and of traffic on the page of performance."""

import hardware
import pytest

from support.project.pages import PAGES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SHRe", "MobileCLIP-S0, 12M"])
def test_the_page_has_the_row_that_the_script_prints(name):
    assert hardware.row(name) in PAGES["docs/performance.md"].splitlines()


@pytest.mark.slow
def test_the_page_has_the_traffic_that_the_script_prints():
    assert hardware.traffic_row("SHRe") in PAGES["docs/performance.md"].splitlines()
