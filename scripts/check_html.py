#!/usr/bin/env python3
"""Open pages of `preshard plan --html` in a browser and use them as a reader would.

usage: check_html.py PAGE.html... [--screenshots DIR]

Needs selenium (PyPI), Chromium and its driver (Debian: chromium, chromium-driver).
"""

import argparse
import json
import os
import pathlib

from selenium import webdriver
from selenium.webdriver.common.by import By

KINDS = ("packed", "decoded", "copied", "replicated")


def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1600"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(os.environ.get("CHROMEDRIVER", "/usr/bin/chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def check(driver, page, screenshots):
    url = page.resolve().as_uri()
    driver.get_log("performance")
    driver.get(url)
    plan = json.loads(driver.find_element(By.ID, "plan").get_attribute("textContent"))
    asked = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
    assert set(asked) == {url}, asked
    errors = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert not errors, errors

    def count(selector):
        return len(driver.find_elements(By.CSS_SELECTOR, selector))

    assert driver.title == plan["title"]
    assert count("script") == 2 and count("img") == 0
    assert count(".rank") == len(plan["rows"])
    assert count("#grid .cell") == len(plan["rows"]) * len(plan["columns"])
    for number, kind in enumerate(KINDS):
        cells = sum(1 for row in plan["rows"] for cell in row["cells"] if cell[number])
        assert count(f"#grid .{kind}") == cells, kind
    # The bars are as long as their bytes: on a common scale, the longest one or the memory is the whole.
    widest = max([plan["memory"] or 0] + [row["bytes"] for row in plan["rows"]])
    for bar, row in zip(driver.find_elements(By.CSS_SELECTOR, ".bar"), plan["rows"], strict=True):
        whole = bar.rect["width"]
        drawn = sum(part.rect["width"] for part in bar.find_elements(By.TAG_NAME, "b"))
        assert abs(drawn - whole * row["bytes"] / widest) < 3, (drawn, whole, row["bytes"])
    fits = [row["bytes"] <= plan["memory"] for row in plan["rows"]] if plan["memory"] else []
    assert count(".rank .bad") == fits.count(False)
    shown = driver.find_element(By.ID, "decoded").text
    for _, _, why, first in plan["decoded"]:
        assert " ".join(why.split()) in shown and first in shown, why

    search = driver.find_element(By.ID, "search")
    name = plan["tensors"][-1][0]
    search.send_keys(name.upper())
    rows = driver.find_elements(By.CSS_SELECTOR, "#tensors tr")
    assert name in [row.find_element(By.TAG_NAME, "td").text for row in rows], name
    search.clear()
    search.send_keys("<no such tensor>")
    assert count("#tensors tr") == 0
    search.clear()
    search.send_keys(" \b")
    assert count("#tensors tr") == min(100, len(plan["tensors"]))

    # Readable on a light and a dark page: text and background differ as WCAG asks (4.5 to 1).
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        colours = driver.execute_script(
            "const s = getComputedStyle(document.body), d = getComputedStyle(document.getElementById('facts'));"
            "return [s.backgroundColor, s.color, d.color]"
        )
        back, *texts = (luminance(colour) for colour in colours)
        for text in texts:
            light, dark = max(back, text), min(back, text)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, colours)
        if screenshots:
            driver.save_screenshot(str(screenshots / f"{page.stem}-{scheme}.png"))
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    print(f"{page}: {page.stat().st_size} bytes, {len(plan['rows'])} rows, {len(plan['tensors'])} tensors: as it says")


def luminance(colour):
    values = [int(v) / 255 for v in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=pathlib.Path)
    parser.add_argument("--screenshots", type=pathlib.Path)
    args = parser.parse_args()
    driver = browser()
    try:
        for page in args.pages:
            check(driver, page, args.screenshots)
    finally:
        driver.quit()


main()
