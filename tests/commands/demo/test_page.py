"""The demo's page in Chromium, as a user opens it, and what its server refuses."""

import json
import signal
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from urllib.error import HTTPError

import pytest

from support.project import browser
from support.project.demo import TEXT, write_images, write_model
from support.runs.forked import VLIGHTNING, Forked
from support.runs.slurm_cluster import wait_for

pytestmark = pytest.mark.skipif(
    find_spec("gradio") is None or find_spec("playwright") is None,
    reason="gradio and playwright are not installed: pip install -e '.[browser]', as .ci/run does",
)
CLASSES = ["ring", "cross", "a <b>circle</b>"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of the page and the folder of its images; in the end it stops as by Ctrl-C."""
    folder = tmp_path_factory.mktemp("demo")
    write_images(folder / "images")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--model",
        write_model(folder),
        "--images",
        folder / "images",
        "--cache",
        folder / "cache",
        "--num_workers=0",
    ]
    process = Forked([VLIGHTNING, "demo", *words, f"--port={port}", "--device=cpu", "--classes", *CLASSES])
    address = f"http://127.0.0.1:{port}"
    wait_for(lambda: answers(port) or process.poll() is not None, 60)
    yield address, folder / "images"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(60)
    assert process.returncode == 0, err
    assert err.count("Traceback") == err.count("was not uploaded by a user")
    assert out.splitlines()[-2:] == [f"Demo: {address} (stop it with Ctrl-C)", "Stopped."]


def answers(port):
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def status(address, headers=(), data=None):
    """The status of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data, dict(headers)), timeout=30) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_text_finds_images_a_word_shows_its_region_and_an_image_gets_captions_and_classes(served):
    if reason := browser.missing():
        pytest.skip(f"no Chromium: {reason}")
    address, images = served
    with browser.opened(address) as (page, asked):
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.get_by_label("Text").fill(TEXT)
        page.get_by_label("Text").press("Enter")
        page.locator(".hits img").first.wait_for()
        numbers = page.locator(".hits figcaption span").filter(has_text="cosine").all_inner_texts()
        assert len(numbers) == 12
        scores = [float(number.removeprefix("cosine ")) for number in numbers]
        assert scores == sorted(scores, reverse=True)
        assert all((images / name).is_file() for name in page.locator(".hits .quiet").all_inner_texts())
        before = page.locator(".hits img").first.get_attribute("src")
        page.get_by_role("radio", name="circle").click()
        page.get_by_text("word 100%").wait_for()
        assert page.locator(".hits img").first.get_attribute("src") != before
        page.get_by_role("tab", name="Describe an image").click()
        page.locator("input[type=file]").first.set_input_files(images / "03.png")
        page.locator(".ranked").nth(1).wait_for()
        known = [row["caption"] for row in json.loads((images / "captions.json").read_text())]
        found = page.locator(".ranked span").all_inner_texts()
        assert len(found) == 8
        assert set(found[:5]) <= set(known)
        assert sorted(found[5:]) == sorted(CLASSES)  # as text, not as elements
        assert page.evaluate("document.fonts.size") == 0
        assert errors == []
        assert [each for each in asked if not each.startswith((address, "data:", "blob:"))] == []
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as elsewhere:
            threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
            sent = f"fetch('http://127.0.0.1:{elsewhere.server_port}', {{mode: 'no-cors'}})"
            assert page.evaluate(f"{sent}.then(() => 'sent', () => 'refused')") == "refused"
            elsewhere.shutdown()


def test_the_server_serves_no_file_of_the_machine_and_only_this_machine(served):
    address, images = served
    secret = images.parent / "secret.png"
    secret.write_bytes((images / "03.png").read_bytes())
    (images / "link.png").symlink_to(secret)
    assert status(address) == 200
    for path in (secret, images / "03.png", images / "link.png", f"{images}/../secret.png", "/etc/hostname"):
        assert status(f"{address}/gradio_api/file={path}") == 403
    assert status(f"{address}/gradio_api/file=https://example.org/") == 403
    assert status(address, {"Host": "evil.example"}) == 400
    assert status(f"{address}/gradio_api/file=/a%00b") == 403
    other_port = f"http://127.0.0.1:{int(address.rpartition(':')[2]) % 65535 + 1}"
    for origin in ("https://evil.example", "http://[", "http://[::1", "null", "http://localhost", other_port):
        assert status(address, {"Origin": origin}) == 403
    assert status(address, {"Origin": address}) == 200
    asked = {"data": [{"path": str(secret), "meta": {"_type": "gradio.FileData"}}, "ring", ""]}
    call = f"{address}/gradio_api/call/describe"
    with urllib.request.urlopen(
        urllib.request.Request(call, json.dumps(asked).encode(), {"Content-Type": "application/json"}), timeout=30
    ) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{call}/{event}", timeout=30) as answer:
        assert answer.read().startswith(b"event: error")  # a file that the page did not receive
    own = [
        each for each in socket.getaddrinfo(socket.gethostname(), None) if not each[4][0].startswith(("127.", "::1"))
    ]
    port = int(address.rpartition(":")[2])
    for family, *_, place in own:
        with socket.socket(family, socket.SOCK_STREAM) as outside:
            assert outside.connect_ex((place[0], port)) != 0
