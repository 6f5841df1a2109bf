"""A proxy between an agent and the server, which can change requests and look at replies."""

import http.client
import http.server
import threading
import urllib.parse

HOP = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "keep-alive"}
MAX_SECONDS = 600


class Proxy:
    """Forwards the requests that come to its `address`, piece by piece as the reply arrives."""

    def __init__(self, url):
        self.url = url
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                proxy.forward(self, self.rfile.read(int(self.headers.get("content-length", 0))))

            def do_GET(self):
                proxy.forward(self, None)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def changed(self, path, body):
        """Returns the body to send instead of `body`, and the `note` for `record`."""
        return body, None

    def record(self, path, note, status, body, reply):
        """Called after each request, with the body that was sent and the text of the reply."""

    def forward(self, handler, body):
        note = None
        if body is not None:
            body, note = self.changed(handler.path, body)
        connection = connect(self.url)
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in HOP}
        connection.request(handler.command, handler.path, body, headers)
        reply = connection.getresponse()
        handler.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in HOP:
                handler.send_header(name, value)
        handler.send_header("connection", "close")
        handler.end_headers()
        handler.close_connection = True
        text = b""
        while piece := reply.read1(65536):
            text += piece
            handler.wfile.write(piece)
            handler.wfile.flush()
        self.record(handler.path, note, reply.status, body, text.decode(errors="replace"))


def connect(url):
    address = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(address.hostname, address.port, timeout=MAX_SECONDS)
