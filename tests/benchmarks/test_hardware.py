"""The table of GPUs on the page of performance."""

import hardware
import pytest

from support.project.pages import PAGES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SHRe", "MobileCLIP-S0, 12M"])
def test_the_page_has_the_row_that_the_script_prints(name):
    assert hardware.row(name) in PAGES["docs/performance.md"].splitlines()
