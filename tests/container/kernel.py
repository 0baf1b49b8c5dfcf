"""Programs for the inside of a container: KERNEL and TERMINAL run code or a line in one of JupyterLab's."""

KERNEL = """
import asyncio, json, sys, uuid
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect

async def main(token, code):
    base = "127.0.0.1:8888/api/kernels"
    patience = {"connect_timeout": 600, "request_timeout": 600}
    post = {"method": "POST", "body": "{}", **patience}
    made = await AsyncHTTPClient().fetch(f"http://{base}?token={token}", **post)
    kernel = json.loads(made.body)["id"]
    channels = f"ws://{base}/{kernel}/channels?token={token}"
    socket = await websocket_connect(HTTPRequest(channels, **patience))
    header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
    header |= {"username": "", "session": ""}
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
    await socket.write_message(json.dumps(
        {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}))
    while message := json.loads(await socket.read_message()):
        kind = message["msg_type"]
        if kind == "stream":
            print(message["content"]["text"], end="")
        elif kind == "error":
            sys.exit("\\n".join(message["content"]["traceback"]))
        elif kind == "execute_reply":
            return

asyncio.run(asyncio.wait_for(main(*sys.argv[1:]), 600))
"""

TERMINAL = """
import asyncio, json, sys
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect

async def main(token, line):
    base = "127.0.0.1:8888/api/terminals"
    patience = {"connect_timeout": 600, "request_timeout": 600}
    post = {"method": "POST", "body": "{}", **patience}
    made = await AsyncHTTPClient().fetch(f"http://{base}?token={token}", **post)
    name = json.loads(made.body)["name"]
    there = f"ws://127.0.0.1:8888/terminals/websocket/{name}?token={token}"
    socket = await websocket_connect(HTTPRequest(there, **patience))
    # Printed in two parts, so that the echo of what is typed isn't taken for it.
    await socket.write_message(json.dumps(["stdin", line + '; printf "%s%s\\\\n" the- end\\r']))
    said = ""
    while "the-end" not in said:
        kind, *rest = json.loads(await socket.read_message())
        said += rest[0] if kind == "stdout" else ""
    print(said)

asyncio.run(asyncio.wait_for(main(*sys.argv[1:]), 600))
"""
