"""JupyterLab in headless Chromium, driven through its own commands and not through the mouse.

`serve(folder)` starts JupyterLab on loopback with settings of its own, so that neither the reader's
JupyterLab nor the notebooks are touched; `browser()` opens Chromium, which may talk to loopback
only; `run(page, ...)` opens one notebook, runs all of its cells and returns them as they then are.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Page, sync_playwright

CHROMIUM = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None
)
QUIET = "--disable-background-networking --disable-component-update --disable-sync --no-first-run"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *QUIET.split()]

SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
}

RUN_ALL = """async (seconds) => {
    let doing = 'JupyterLab starts';
    const run = async () => {
        const app = window.jupyterapp;
        await app.restored;
        const notebook = app.shell.currentWidget;
        doing = 'the notebook opens';
        await notebook.context.ready;
        doing = 'the kernel starts';
        await notebook.sessionContext.ready;
        const kernel = notebook.sessionContext.session.kernel;
        await kernel.info;
        doing = 'the cells run';
        await app.commands.execute('notebook:run-all-cells');
        // The command returns at the first error, announced or not; this answer queues behind all.
        await kernel.requestKernelInfo();
        return notebook.content.model.toJSON().cells;
    };
    const late = new Promise((_, reject) => setTimeout(
        () => reject(new Error(`after ${seconds} s still: ${doing}`)), seconds * 1000));
    return Promise.race([run(), late]);
}"""


class Server(NamedTuple):
    url: str
    token: str


@contextmanager
def serve(folder: Path, home: Path) -> Iterator[Server]:
    """JupyterLab over this folder; its configuration, state and log lie in home."""
    port, token = free_port(), secrets.token_hex(16)
    options = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={folder}",
        f"--FileCheckpoints.checkpoint_dir={home / 'checkpoints'}",
        "--LabApp.expose_app_in_browser=True",
    ]
    log = home / "jupyterlab.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "jupyterlab", *options]
        process = subprocess.Popen(command, env=own_folders(home), stdout=output, stderr=output)
    try:
        wait_until_up(f"http://127.0.0.1:{port}/api?token={token}", process, log)
        yield Server(f"http://127.0.0.1:{port}", token)
    finally:
        process.terminate()
        process.wait(timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def own_folders(home: Path) -> dict[str, str]:
    """An environment in which JupyterLab reads and writes its settings below home only."""
    for name, values in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    folders = {
        "JUPYTER_CONFIG_DIR": home / "config",
        "JUPYTER_DATA_DIR": home / "data",
        "JUPYTER_RUNTIME_DIR": home / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": home / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": home / "workspaces",
    }
    return os.environ | {name: str(folder) for name, folder in folders.items()}


def wait_until_up(url: str, process: subprocess.Popen, log: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start within {seconds} s:\n{log.read_text()[-3000:]}")


@contextmanager
def browser() -> Iterator[Page]:
    """A page that reaches loopback only; `asked_outside` lists what else it wanted."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        page.asked_outside = []
        page.route("**/*", lambda route: local_only(page, route))
        yield page
        chromium.close()


def local_only(page: Page, route) -> None:
    if route.request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
        route.continue_()
    else:
        page.asked_outside.append(route.request.url)
        route.abort()


def run(page: Page, server: Server, notebook: str, seconds: float) -> list[dict]:
    """Open a notebook by its path below the served folder, run all cells, and return them."""
    page.goto(f"{server.url}/doc/tree/{notebook}?token={server.token}&reset")
    page.wait_for_function(
        "window.jupyterapp && window.jupyterapp.shell.currentWidget", timeout=60_000
    )
    return page.evaluate(RUN_ALL, seconds)


def picture(page: Page, folder: Path, name: str, cells: int) -> None:
    """The top and the end of the open notebook, as folder/name-top.png and folder/name-end.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, index in (("top", 0), ("end", cells - 1)):
        scroll = "(i) => window.jupyterapp.shell.currentWidget.content.scrollToItem(i)"
        page.evaluate(scroll, index)
        page.wait_for_timeout(500)
        page.screenshot(path=folder / f"{name}-{place}.png")
