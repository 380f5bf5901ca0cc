"""The table of faults: the fault of a test, how it is injected, and the guarantee.

    @pytest.mark.fault("killed in mid-epoch", "SIGKILL before the optimizer's step", "the same end, bit for bit")
    def test_...

`pytest -m fault --all-faults` runs every method against every fault, and prints the table; without `--all-faults` one
method meets all faults, and every method one.
"""

from collections import Counter, defaultdict

HEADER = ("fault", "how injected", "promise", "outcome")


def pytest_addoption(parser):
    parser.addoption("--all-faults", action="store_true", help="every method against every fault (about 20 minutes)")


def pytest_collection_modifyitems(config, items):
    left_out = []
    for number, item in enumerate(items):
        marker = item.get_closest_marker("fault")
        if marker is not None:
            item.user_properties.append(("fault", [number, *marker.args]))
        if item.get_closest_marker("all_faults") is not None and not config.getoption("--all-faults"):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("-m") != "fault":
        return
    outcomes, places = defaultdict(Counter), {}
    for outcome in ("passed", "failed", "skipped", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            fault = dict(report.user_properties).get("fault")
            if fault is not None and (report.when == "call" or outcome != "passed"):
                place, *words = fault
                outcomes[tuple(words)][outcome] += 1
                places[tuple(words)] = min(place, places.get(tuple(words), place))
    said = {"passed": "held", "failed": "BROKEN", "error": "BROKEN", "skipped": "not run"}
    rows = [
        (*fault, ", ".join(f"{said[outcome]} ({number})" for outcome, number in counted.items()))
        for fault, counted in sorted(outcomes.items(), key=lambda row: places[row[0]])
    ]
    terminalreporter.section("faults")
    for row in (HEADER, ("---",) * len(HEADER), *rows):
        terminalreporter.write_line(f"| {' | '.join(row)} |")
