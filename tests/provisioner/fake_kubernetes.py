"""Pods and secrets of Kubernetes' API on one port, for tests. No real cluster: nothing runs, nothing is scheduled.

Run with the Python of .venv-clouds: `fake_kubernetes.py PORT`. Bodies are checked against the schemas that Kubernetes
publishes (its OpenAPI document, strict: an unknown field is an error) and answered as an API server answers: 201, 404,
409, 422, lists with label selectors and pages, deletion with a grace period, secrets that go with their owner.

For tests: POST /test/pods/NAME {"phase"|"reason"|"message"|"conditions"|"startTime"} is the kubelet's word; GET
/test/pods and /test/secrets: all of them; POST /test/fail {"answers": [null, 503]}: the next answers, null as ever;
POST /test/clear.
"""

import itertools
import json
import sys
import threading
import uuid
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

VERSION = kubernetes_validate.latest_version()
KINDS = {"pods": "Pod", "secrets": "Secret"}


class Failure(Exception):
    """A Status object."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Api:
    """What is there: (plural, namespace, name) -> object."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.versions = itertools.count(1)
        self.lock = threading.RLock()
        self.failing: list[int | None] = []

    def create(self, plural: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("kind") != KINDS[plural] or body.get("apiVersion") != "v1":
            raise Failure(400, "BadRequest", f"the object is no {KINDS[plural]} of v1")
        try:
            kubernetes_validate.validate(body, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Failure(422, "Invalid", str(error.message)) from None
        metadata = body["metadata"]
        key = (plural, namespace, metadata["name"])
        if metadata.get("namespace", namespace) != namespace:
            raise Failure(400, "BadRequest", "the namespace of the object does not match the request's")
        if key in self.objects:
            raise Failure(409, "AlreadyExists", f'{plural} "{key[2]}" already exists')
        metadata |= {
            "namespace": namespace,
            "uid": str(uuid.uuid4()),
            "creationTimestamp": now(),
            "resourceVersion": str(next(self.versions)),
        }
        if plural == "pods":
            body["status"] = {"phase": "Pending", "startTime": now()}
        else:
            body.pop("stringData", None)  # write-only
        self.objects[key] = body
        return body

    def get(self, plural: str, namespace: str, name: str) -> dict[str, Any]:
        found = self.objects.get((plural, namespace, name))
        if found is None:
            raise Failure(404, "NotFound", f'{plural} "{name}" not found')
        return found

    def items(self, plural: str, namespace: str, query: dict[str, list[str]]) -> dict[str, Any]:
        selector = dict(part.split("=", 1) for part in query.get("labelSelector", [""])[0].split(",") if part)
        names = sorted(name for kind, space, name in self.objects if (kind, space) == (plural, namespace))
        found = [self.objects[plural, namespace, name] for name in names]
        found = [o for o in found if selector.items() <= o["metadata"].get("labels", {}).items()]
        first, limit = int(query.get("continue", ["0"])[0]), int(query.get("limit", ["0"])[0]) or len(found)
        metadata: dict[str, Any] = {"resourceVersion": str(next(self.versions))}
        if first + limit < len(found):
            metadata["continue"] = str(first + limit)
        page = found[first : first + limit]
        return {"kind": f"{KINDS[plural]}List", "apiVersion": "v1", "metadata": metadata, "items": page}

    def delete(self, plural: str, namespace: str, name: str) -> dict[str, Any]:
        """A running pod ends after its grace period; here: with the next word of the kubelet."""
        found = self.get(plural, namespace, name)
        running = plural == "pods" and found["status"]["phase"] == "Running"
        if running and "deletionTimestamp" not in found["metadata"]:
            grace_s = found["spec"].get("terminationGracePeriodSeconds", 30)
            found["metadata"] |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace_s}
        elif not running:
            self.remove(plural, namespace, name)
        return found

    def remove(self, plural: str, namespace: str, name: str) -> None:
        uid = self.objects.pop((plural, namespace, name))["metadata"]["uid"]
        for key, other in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in other["metadata"].get("ownerReferences", ())):
                del self.objects[key]

    def kubelet(self, name: str, word: dict[str, Any]) -> dict[str, Any]:
        key = next(key for key in self.objects if key[0] == "pods" and key[2] == name)
        found = self.objects[key]
        found["status"] |= word
        if found["status"]["phase"] in ("Succeeded", "Failed") and "deletionTimestamp" in found["metadata"]:
            self.remove(*key)
        return found


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api = Api()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_DELETE(self) -> None:
        self.answer()

    def answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        try:
            with self.api.lock:
                status, found = self.route(body)
        except Failure as failure:
            status, message = failure.status, str(failure)
            found = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
            found |= {"message": message, "reason": failure.reason}
        raw = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def route(self, body: dict[str, Any]) -> tuple[int, Any]:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        if parts[0] == "test":
            return 200, self.control(parts[1:], body)
        wanted = self.api.failing.pop(0) if self.api.failing else None
        if wanted:
            raise Failure(wanted, "AsTheTestWants", "as the test wants it")
        match parts:
            case ["api", "v1", "namespaces", namespace, plural] if plural in KINDS:
                if self.command == "POST":
                    return 201, self.api.create(plural, namespace, body)
                return 200, self.api.items(plural, namespace, parse_qs(url.query))
            case ["api", "v1", "namespaces", namespace, plural, name] if plural in KINDS:
                if self.command == "DELETE":
                    return 200, self.api.delete(plural, namespace, name)
                return 200, self.api.get(plural, namespace, name)
        raise Failure(404, "NotFound", "the server could not find the requested resource")

    def control(self, parts: list[str], body: dict[str, Any]) -> Any:
        match parts:
            case ["pods", name]:
                return self.api.kubelet(name, body)
            case ["pods"]:
                return [found for (kind, _, _), found in self.api.objects.items() if kind == "pods"]
            case ["secrets"]:
                return [found for (kind, _, _), found in self.api.objects.items() if kind == "secrets"]
            case ["fail"]:
                self.api.failing = body["answers"]
            case ["clear"]:
                self.api.objects.clear()
                self.api.failing = []
        return {}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its parameter's name)
        print(self.command, self.path, *args[1:], file=sys.stderr)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
