"""A small MCP server over stdio, from the specification alone; misbehaves on request. Run as a program by the tests."""

import json
import os
import sys

NOTHING = {"type": "object", "properties": {}}
# A PNG file of one pixel.
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
    {"name": "fail", "inputSchema": NOTHING},
    {"name": "die", "inputSchema": NOTHING},
    {"name": "hang", "inputSchema": NOTHING},
    {"name": "where", "inputSchema": NOTHING},
    {"name": "everything", "inputSchema": NOTHING},
    {"name": "picture", "inputSchema": NOTHING},
    {"name": "cancelled", "inputSchema": NOTHING},
    {"name": "answers", "inputSchema": NOTHING},
]
seen: dict[str, list] = {"cancelled": [], "answers": [], "initialized": []}


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def text(said, **more):
    return {"content": [{"type": "text", "text": said}], **more}


def called(name, arguments):
    if name == "add":
        return text(str(arguments["a"] + arguments["b"]))
    if name == "fail":
        return text("it cannot be done", isError=True)
    if name == "die":
        sys.stderr.write("I am tired\n")
        sys.stderr.flush()
        os._exit(3)
    if name == "where":
        return text(json.dumps({"cwd": os.getcwd(), "env": sorted(os.environ), "pid": os.getpid()}))
    if name == "everything":
        return {
            "content": [
                {"type": "text", "text": "words"},
                {"type": "image", "data": "AAAA", "mimeType": "image/png"},
                {"type": "resource", "resource": {"uri": "file:///a", "text": "a file"}},
                {"type": "resource_link", "uri": "file:///b", "name": "b"},
            ]
        }
    if name == "picture":
        return {"content": [{"type": "text", "text": "a dot"}, {"type": "image", "data": DOT, "mimeType": "image/png"}]}
    return text(json.dumps(seen[name]))


def answer(message):
    method, params = message["method"], message.get("params", {})
    if method == "initialize":
        version = sys.argv[1] if len(sys.argv) > 1 else params["protocolVersion"]
        about = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "t", "version": "0"}}
        send({"id": message["id"], "result": about})
        send({"id": "mine", "method": "roots/list"})
        send({"id": "yours", "method": "ping"})
        send({"method": "notifications/message", "params": {"level": "info", "data": "hello"}})
        sys.stdout.write("a print that strayed\n")
    elif method == "tools/list":
        at = int(params.get("cursor", 0))
        more = {"nextCursor": str(at + 3)} if at + 3 < len(TOOLS) else {}
        send({"id": message["id"], "result": {"tools": TOOLS[at : at + 3], **more}})
    elif method == "tools/call" and params["name"] == "hang":
        return
    elif method == "tools/call" and params["name"] not in [tool["name"] for tool in TOOLS]:
        send({"id": message["id"], "error": {"code": -32602, "message": "Unknown tool"}})
    elif method == "tools/call":
        assert seen["initialized"], "calls come after the handshake"
        send({"id": message["id"], "result": called(params["name"], params["arguments"])})


for line in sys.stdin:
    message = json.loads(line)
    if "method" not in message:
        seen["answers"].append([message["id"], "result" in message])
    elif message["method"] == "notifications/cancelled":
        seen["cancelled"].append(message["params"]["requestId"])
    elif message["method"] == "notifications/initialized":
        seen["initialized"].append(True)
    else:
        answer(message)
