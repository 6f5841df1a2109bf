"""Evaluates every query of the Grafana dashboard in a Prometheus that scrapes a running server.

    python3 crates/serve/cli/tests/dashboard.py target/release/stolon

Needs the program `prometheus`. Fails if Prometheus refuses a query or has no data for it.
"""

import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

DASHBOARD = pathlib.Path(__file__).resolve().parents[2] / "http" / "dashboards" / "stolon.json"
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: stolon
    static_configs: [{{targets: ["{address}"]}}]
"""
# Where nothing was refused, preempted or stored, there is nothing to show.
MAY_BE_EMPTY = ["admission_rejections", "preemptions_by_reason", "evicted_blocks", "kv_object_store"]


def get(url, body=None):
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None)
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def free_address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return "127.0.0.1:%d" % listener.getsockname()[1]


def load(server, seconds):
    """Requests that share a prefix, and some that do not."""
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += 1
        prompt = "The keeper lights the lamp every evening. " * 4 + str(number % 3)
        get(f"{server}/v1/completions", {"prompt": prompt, "max_tokens": 8})
        time.sleep(0.05)


def check(prometheus, dashboard):
    """Returns the number of queries that have failed."""
    def query(expression):
        arguments = urllib.parse.urlencode({"query": expression})
        return get(f"{prometheus}/api/v1/query?{arguments}")["data"]["result"]

    model = query("stolon:cache_config_info")[0]["metric"]["model_name"]
    failed = count = 0
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            count += 1
            expression = target["expr"].replace("$model_name", model).replace("$__rate_interval", "10s")
            try:
                result = query(expression)
            except urllib.error.HTTPError as error:
                failed += 1
                print(f"{panel['title']}: {error.read().decode()}")
                continue
            if not result and not any(name in expression for name in MAY_BE_EMPTY):
                failed += 1
                print(f"{panel['title']}: no data for {expression}")
    print(f"{count} queries of the dashboard, {failed} failed")
    return failed


def main():
    binary = sys.argv[1]
    prometheus = None
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "serve", "--model", "demo", "--port", "0", f"--kv-cache-dir={folder}/kv"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            url = next(line.split()[-1] for line in server.stdout if "listening on" in line)
            config = pathlib.Path(folder) / "prometheus.yml"
            config.write_text(CONFIG.format(address=url.removeprefix("http://")))
            address = free_address()
            prometheus = subprocess.Popen(
                ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={address}"],
                stderr=subprocess.DEVNULL,
            )
            load(url, 15)
            failed = check(f"http://{address}", json.loads(DASHBOARD.read_text()))
        finally:
            for process in filter(None, (server, prometheus)):
                process.terminate()
                process.wait()
    sys.exit(1 if failed else 0)


main()
