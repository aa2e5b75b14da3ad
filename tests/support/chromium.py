"""Pages in a headless Chromium: how wide they are, what lies beyond their edges, how legible their text is, what the policy refused."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "headless_shell")

# what is out of the window and in no part that scrolls by itself; text of less contrast with what is behind it than WCAG 2 asks for;
# short words of tables that are torn apart
_MEASURE = """(async () => {
const loaded = i => { i.loading = "eager"; return i.decode().then(() => i, () => i); };  // those below the window are lazy
const pictures = await Promise.all([...document.images].map(loaded));
const root = document.documentElement, width = root.clientWidth, beyond = [], faint = [], torn = [];
const scrolls = e => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
const numbers = c => (c.match(/[\\d.]+/g) || []).map(Number);
const behind = e => {
  for (; e; e = e.parentElement) { const c = numbers(getComputedStyle(e).backgroundColor); if (c.length == 3 || c[3] == 1) return c; }
  return [255, 255, 255]; };
const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b; };
for (const e of document.body.querySelectorAll("*")) {
  const box = e.getBoundingClientRect(), name = e.tagName + ": " + (e.textContent || "").trim().slice(0, 40);
  if (box.width && box.right > width + 1 && !scrolls(e.parentElement)) beyond.push(name);
  if (box.width && [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())) {
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const [a, b] = [light(numbers(svg ? style.fill : style.color)), light(behind(e))];
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (contrast < 4.5) faint.push(name + " " + contrast.toFixed(1)); } }
for (const cell of document.querySelectorAll("td, th")) for (const node of cell.childNodes) if (node.nodeType == 3)
  for (const word of node.data.matchAll(/[\\w.,%]{1,12}(?=\\s|$)/g)) {
    const range = document.createRange();
    range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
    const whole = !word.index || /\\s/.test(node.data[word.index - 1]);
    if (whole && range.getClientRects().length > 1) torn.push(word[0]); }
return {width, content: root.scrollWidth, height: root.scrollHeight, beyond, faint, torn,
  pictures: pictures.filter(i => !i.naturalWidth).length,
  shrunk: pictures.filter(i => i.closest(".plot") && i.width < .7 * i.naturalWidth).length}; })()"""


@dataclass(frozen=True)
class View:
    """A page in a window: pixels of the window and the content, elements beyond its edge, faint text, torn words,
    pictures that are not shown, plots too small to read, messages of the browser (what its policy refused), and a screenshot as PNG."""

    page: str
    scheme: str
    width: int
    content: int
    beyond: Sequence[str]
    faint: Sequence[str]
    torn: Sequence[str]
    unseen_pictures: int
    shrunk: int
    messages: Sequence[str]
    png: bytes


def browser() -> str | None:
    """The path of a Chromium: that in the variable CHROMIUM, else one on the path; None without one."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


def views(program: str, pages: Sequence[Path], widths: Sequence[int]) -> list[View]:
    """Each page at each width, light and dark."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-port=0",
        ]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            address = next(line.split()[-1] for line in process.stderr if "DevTools listening on" in line)
            return asyncio.run(_views(address.split("/")[2], pages, widths))
        finally:
            process.kill()
            process.wait()


async def _views(host: str, pages: Sequence[Path], widths: Sequence[int]) -> list[View]:
    seen = []
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://{host}/json/new?about:blank") as answer:
            address = (await answer.json())["webSocketDebuggerUrl"]
        async with session.ws_connect(address, max_msg_size=0) as socket:
            tab = _Tab(socket)
            await tab.call("Log.enable")
            await tab.call("Page.enable")
            for page in pages:
                for width in widths:
                    seen += [await tab.view(page, width, scheme) for scheme in ("light", "dark")]
    return seen


class _Tab:
    """A tab of the browser, by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.count = socket, 0
        self.messages: list[str] = []
        self.loaded = False

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.socket.receive_json(timeout=60)
        self.loaded |= message.get("method") == "Page.loadEventFired"
        if message.get("method") == "Log.entryAdded":
            self.messages.append(message["params"]["entry"]["text"])
        return message

    async def call(self, method: str, **parameters: Any) -> Any:
        """The result of a call; what happens meanwhile is noted."""
        self.count += 1
        await self.socket.send_json({"id": self.count, "method": method, "params": parameters})
        while (message := await self._receive()).get("id") != self.count:
            pass
        assert "result" in message, message
        return message["result"]

    async def view(self, page: Path, width: int, scheme: str) -> View:
        """The page in a window of this width."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.messages, self.loaded = [], False
        await self.call("Page.navigate", url=page.resolve().as_uri())
        while not self.loaded:
            await self._receive()
        value = (await self.call("Runtime.evaluate", expression=_MEASURE, awaitPromise=True, returnByValue=True))[
            "result"
        ]["value"]
        whole = {"x": 0, "y": 0, "width": width, "height": min(value["height"], 6000), "scale": 1}
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=whole)
        png = base64.b64decode(shot["data"])
        measured = (value["width"], value["content"], value["beyond"], value["faint"], value["torn"])
        return View(page.name, scheme, *measured, value["pictures"], value["shrunk"], self.messages, png)
