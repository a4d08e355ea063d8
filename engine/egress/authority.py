"""A certificate authority for one run: its key never leaves this process, and only sandboxes trust its certificate.

Leaf certificates are made when a host is first asked for and kept. Knows no policy. The library is loaded when the
first authority is made.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from uniagent.engine.egress.target import is_address

KEPT = 512
DAYS = 30


class Authority:
    """``certificate`` is its own, in PEM. ``now``: the wall clock, for the dates in certificates."""

    def __init__(self, now: datetime.datetime) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import NameOID

        self._now = now
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "uniagent egress proxy")])
        self._name = name
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        built = (
            self._builder(name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate: bytes = built.public_bytes(Encoding.PEM)
        self._leaf_pem = self._leaf_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()

    def _builder(self, subject: Any, public: Any) -> Any:
        from cryptography import x509

        day = datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - day)
            .not_valid_after(self._now + DAYS * day)
        )

    def leaf(self, host: str) -> bytes:
        """A certificate for one host, and the key that all leaves share, in PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
        name = x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)
        built = (
            self._builder(subject, self._leaf_key.public_key())
            .add_extension(x509.SubjectAlternativeName([name]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._leaf_key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return bytes(built.public_bytes(Encoding.PEM)) + self._leaf_pem

    def context(self, host: str) -> ssl.SSLContext:
        """How to answer a client that believes it talks to ``host``. A millisecond the first time: call it in a
        thread."""
        if host in self._contexts:
            self._contexts.move_to_end(host)
            return self._contexts[host]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        with tempfile.NamedTemporaryFile() as file:  # made with mode 0600; the ssl module reads certificates from files
            file.write(self.leaf(host))
            file.flush()
            context.load_cert_chain(file.name)
        self._contexts[host] = context
        if len(self._contexts) > KEPT:
            self._contexts.popitem(last=False)
        return context

    def bundle(self) -> bytes:
        """What this machine trusts, and this authority, in PEM: a whole trust store."""
        paths = ssl.get_default_verify_paths()
        system = next((p for p in (paths.cafile, paths.openssl_cafile, *SYSTEM_BUNDLES) if p and os.path.exists(p)), "")
        trusted = Path(system).read_bytes().rstrip() + b"\n" if system else b""
        return trusted + self.certificate


SYSTEM_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
