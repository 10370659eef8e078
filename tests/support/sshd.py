"""Hosts to reach by ssh: OpenSSH's server on loopback addresses of this machine, with keys of the test's own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import psutil

# Where Debian has it, which is not on everybody's PATH; it wants to be started by its whole name.
SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
MISSING = "" if SSHD and shutil.which("ssh") and shutil.which("ssh-keygen") else "no OpenSSH server or client here"
_SEPARATION = Path("/run/sshd")


class SshHosts:
    """Servers at some addresses, all on one port.

    Args:
      folder: where keys and logs go.
      port: free at all addresses.
      settings: more lines of sshd_config.
    """

    def __init__(self, folder: Path, port: int, settings: str = ""):
        folder.mkdir()
        self._folder = folder
        self._port = port
        self._settings = settings
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        if os.geteuid() == 0 and not _SEPARATION.exists():
            _SEPARATION.mkdir(mode=0o755)  # as Debian's service does
        for name in ("host", "user", "stranger"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "authorized").write_text((folder / "user.pub").read_text())

    def command(self, key: str = "user", **options: str) -> str:
        """--ssh_command for these hosts."""
        given = {"UserKnownHostsFile": str(self._folder / "known"), "IdentitiesOnly": "yes", **options}
        words = ["ssh", "-F", "none", "-p", str(self._port), "-i", str(self._folder / key)]
        return shlex.join([*words, *(word for name, value in given.items() for word in ("-o", f"{name}={value}"))])

    def start(self, *addresses: str) -> None:
        """Brings hosts up, and waits until they answer."""
        key = " ".join((self._folder / "host.pub").read_text().split()[:2])
        for address in addresses:
            with (self._folder / "known").open("a") as known:
                known.write(f"[{address}]:{self._port} {key}\n")
            config = self._folder / f"{address}.conf"
            config.write_text(
                f"Port {self._port}\nListenAddress {address}\nHostKey {self._folder}/host\n"
                f"AuthorizedKeysFile {self._folder}/authorized\nPidFile none\nStrictModes no\nUsePAM no\n"
                f"PasswordAuthentication no\nKbdInteractiveAuthentication no\n{self._settings}"
            )
            log = self._folder / f"{address}.log"
            # The session's environment is its own, not that of the tests.
            self._servers[address] = subprocess.Popen(
                [str(SSHD), "-D", "-f", str(config), "-E", str(log)],
                env={"PATH": os.environ["PATH"]},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        for address in addresses:
            log = self._folder / f"{address}.log"
            deadline = time.monotonic() + 60
            while not log.exists() or "Server listening" not in log.read_text():
                server = self._servers[address]
                assert server.poll() is None, f"sshd ended: {log.read_text() if log.exists() else 'no log'}"
                assert time.monotonic() < deadline, "sshd does not listen"
                time.sleep(0.01)
            log.unlink()

    def sessions(self, address: str) -> list[psutil.Process]:
        """The server's processes for connections that are open now."""
        children = psutil.Process(self._servers[address].pid).children(recursive=True)
        return [child for child in children if child.name().startswith("sshd")]

    def stop(self, address: str) -> None:
        """Takes a host away: nobody listens, and its connections break."""
        server = self._servers.pop(address)
        sessions = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        server.wait()
        for session in sessions:
            if session.is_running() and session.name().startswith("sshd"):
                session.kill()

    def close(self) -> None:
        """Takes all away."""
        for address in list(self._servers):
            self.stop(address)


def agents(folder: Path) -> list[psutil.Process]:
    """Agents whose working directory is `folder`, without the clients that run them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.cmdline()[1:] == ["-m", "launcher.jobs.agent"] and process.cwd() == str(folder):
                found.append(process)
    return found
