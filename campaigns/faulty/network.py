# SPDX-License-Identifier: Apache-2.0
"""Network faults: connections that are cut, and packets that are dropped."""

import asyncio
import os
import shutil
import socket
import struct
import subprocess
import sys


def enter_namespaces():
    """Run this script with a loopback device and a /dev/shm of its own, where that is allowed."""
    if "FAULTS_ALONE" in os.environ or shutil.which("unshare") is None:
        return
    as_root = ["--map-root-user"] * (os.geteuid() != 0)
    setup = 'ip link set lo up && mount -t tmpfs faults /dev/shm && exec "$@"'
    command = ["unshare", *as_root, "--net", "--mount", "sh", "-c", setup, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
        os.environ["FAULTS_ALONE"] = "1"
        os.execvp(command[0], [*command, sys.executable, *sys.argv])


def tc(*arguments):
    return subprocess.run(["tc", *arguments], capture_output=True)


def can_drop_packets():
    """Prepare for drop_packets; return whether it works."""
    if "FAULTS_ALONE" not in os.environ or shutil.which("tc") is None:
        return False
    return tc(*"qdisc add dev lo clsact".split()).returncode == 0 and drop_packets(1, 1)()


def drop_packets(port, number):
    """Drop all packets from and to the port; return a function that ends this."""
    # Classic BPF. The ports stand at 34 and 36; 2 is TC_ACT_SHOT, and -1 leaves a packet alone.
    program = f"6,40 0 0 34,21 3 0 {port},40 0 0 36,21 1 0 {port},6 0 0 4294967295,6 0 0 2"
    at = f"dev lo egress pref {number}".split()
    done = tc("filter", "add", *at, "bpf", "da", "bytecode", program)
    return lambda: done.returncode == 0 and tc("filter", "del", *at).returncode == 0


class Proxy:
    """Forwards connections to a server; can cut them all, or hold their data for a while."""

    def __init__(self, server_port, loop):
        self.server_port, self.loop = server_port, loop
        self.writers = set()
        self.flowing = None

    async def start(self):
        self.flowing = asyncio.Event()
        self.flowing.set()
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def _forward(self, reader, writer):
        writers = {writer}
        try:
            await self.flowing.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
            writers.add(far_writer)
            self.writers |= writers
            for w in writers:
                at_once = struct.pack("ii", 1, 0)  # closing sends RST
                w.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            pumps = [(reader, far_writer), (far_reader, writer)]
            pumps = [asyncio.create_task(self._pump(*ends)) for ends in pumps]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
        except OSError:
            pass  # no server listens there
        finally:
            for w in writers:
                w.transport.abort()
            self.writers -= writers

    async def _pump(self, reader, writer):
        try:
            while data := await reader.read(2**18):
                await self.flowing.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass

    def cut(self):
        self.loop.call_soon_threadsafe(lambda: [w.transport.abort() for w in self.writers])

    def hold(self):
        self.loop.call_soon_threadsafe(self.flowing.clear)
        return lambda: self.loop.call_soon_threadsafe(self.flowing.set)
