# A small web service, on connections that stay open: the progress of the computation.
import http.server


class Service(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        text = open("/run/chain").read().encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words):
        pass


http.server.ThreadingHTTPServer(("", 80), Service).serve_forever()
