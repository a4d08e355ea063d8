"""How programs in a sandbox find the egress proxy, and why they trust it: environment variables and trust stores.

The proxy listens on a fixed port of the sandbox's own loopback, where nothing else of ours does. Knows no proxy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PROXY_PORT = 3128
TRUST = "/run/uniagent-trust"  # where a sandbox sees what it trusts
BUNDLE, CERTIFICATE = "bundle.pem", "proxy-ca.pem"
# system stores that are one file
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")
# read by: Python's ssl and what uses OpenSSL; requests; pip; curl; git; cargo; npm; Nix; Deno; the AWS tools
WHOLE = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "CARGO_HTTP_CAINFO",
         "NPM_CONFIG_CAFILE", "NIX_SSL_CERT_FILE", "DENO_CERT", "AWS_CA_BUNDLE")  # fmt: skip


def proxy_environment(*, guarded: bool) -> Mapping[str, str]:
    """Variables of every process of a sandbox behind the proxy; ``guarded``: the proxy ends TLS."""
    url = f"http://127.0.0.1:{PROXY_PORT}"
    near = "localhost,127.0.0.1,::1"
    found = {name: url for word in ("HTTP_PROXY", "HTTPS_PROXY") for name in (word, word.lower())}
    found |= {"NO_PROXY": near, "no_proxy": near, "NODE_USE_ENV_PROXY": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if guarded:
        found |= dict.fromkeys(WHOLE, f"{TRUST}/{BUNDLE}")
        found["NODE_EXTRA_CA_CERTS"] = f"{TRUST}/{CERTIFICATE}"
    return found


def write_trust(folder: Path, bundle: bytes, certificate: bytes) -> None:
    """The folder that guarded sandboxes see as ``TRUST``."""
    folder.mkdir(exist_ok=True)
    (folder / BUNDLE).write_bytes(bundle)
    (folder / CERTIFICATE).write_bytes(certificate)
