"""Certificates for servers on this machine, made for one test run."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates. Its own certificate is the file `cert`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name_of(name)
        made = _unsigned(self._name, self._name, self._key)
        basic = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = made.add_extension(basic, critical=True).sign(
            self._key, hashes.SHA256()
        )
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> Pair:
        """Make a certificate for 127.0.0.1, good for servers and for clients."""
        key = ec.generate_private_key(ec.SECP256R1())
        host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(_HOST))])
        made = _unsigned(_name_of(name), self._name, key).add_extension(host, critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def _name_of(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        # The clocks of one test run differ a little.
        not_valid_before=now - timedelta(minutes=5),
        not_valid_after=now + timedelta(days=1),
    )
