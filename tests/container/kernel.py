"""A program for the inside of a container: `kernel.py TOKEN CODE` runs code in a kernel of JupyterLab's."""

KERNEL = """
import asyncio, json, sys, uuid
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

async def main(token, code):
    base = "127.0.0.1:8888/api/kernels"
    made = await AsyncHTTPClient().fetch(f"http://{base}?token={token}", method="POST", body="{}")
    kernel = json.loads(made.body)["id"]
    socket = await websocket_connect(f"ws://{base}/{kernel}/channels?token={token}")
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

asyncio.run(asyncio.wait_for(main(*sys.argv[1:]), 120))
"""
