"""Tenants of the service: who may use it, by which API key, and within which quotas."""

from __future__ import annotations

import hmac
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from miles.core.errors import UsageError

__all__ = ["Quota", "Tenant", "TenantKeys", "read_tenants"]

DEFAULT = "default"
"""The one tenant of a service without a file of tenants."""
_MIN_KEY = 16
# Clients of the API refuse any other key before they send it.
_PREFIX = "tml-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one tenant may have at once."""

    max_adapters: int = 16
    max_queued: int = 256
    max_stored_bytes: int = 64 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant, the digest of its key (None: any key), and its quota."""

    name: str
    key_digest: bytes | None
    quota: Quota


class TenantKeys:
    """Finds the tenant of a key. Every key is compared in constant time, against all tenants."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = tuple(tenants)
        self.quotas: Mapping[str, Quota] = {tenant.name: tenant.quota for tenant in self._tenants}

    def find(self, key: str | None) -> str | None:
        """Return the name of the tenant with this key, or None."""
        digest = digest_key(key or "")
        found: str | None = None
        for tenant in self._tenants:
            if tenant.key_digest is None or hmac.compare_digest(tenant.key_digest, digest):
                found = tenant.name
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tenant.name for tenant in self._tenants)

    @property
    def is_open(self) -> bool:
        """Whether any key is accepted."""
        return any(tenant.key_digest is None for tenant in self._tenants)


def digest_key(key: str) -> bytes:
    """Return the digest under which a key is kept."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_tenants(file: Path, default: Quota) -> TenantKeys:
    """Read a TOML file with a table ``[tenants.NAME]`` for each tenant: its ``key``, and quotas that differ.

    UsageError with one sentence for what is wrong with it.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--service-tenants {file} cannot be read: {error}.") from error
    tables = content.get("tenants")
    if not isinstance(tables, dict) or not tables or set(content) != {"tenants"}:
        raise UsageError(f"--service-tenants {file} must have a table [tenants.NAME] for each tenant, and no other.")
    tenants = [_read_tenant(file, name, table, default) for name, table in tables.items()]
    if len({tenant.key_digest for tenant in tenants}) < len(tenants):
        raise UsageError(f"--service-tenants {file} gives two tenants the same key; each needs its own.")
    return TenantKeys(tenants)


def _read_tenant(file: Path, name: str, table: Any, default: Quota) -> Tenant:
    known = {field.name for field in fields(Quota)}
    where = f"--service-tenants {file}: tenant {name}"
    if not isinstance(table, dict) or not isinstance(table.get("key"), str) or len(table["key"]) < _MIN_KEY:
        raise UsageError(f"{where} needs a key of at least {_MIN_KEY} characters.")
    if not table["key"].startswith(_PREFIX):
        raise UsageError(f"{where} has a key that does not start with {_PREFIX}, which the tinker client wants.")
    values = {key: value for key, value in table.items() if key != "key"}
    for key, value in values.items():
        if key not in known:
            raise UsageError(f"{where} has {key}, which is none of key, {', '.join(sorted(known))}.")
        if type(value) is not int or value < 0:
            raise UsageError(f"{where} has {key} = {value!r}, must be a whole number, 0 or more.")
    quota = Quota(**{name: values.get(name, getattr(default, name)) for name in sorted(known)})
    return Tenant(name=name, key_digest=digest_key(table["key"]), quota=quota)
