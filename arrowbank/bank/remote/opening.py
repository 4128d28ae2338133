"""From an address to the place that it names."""

from __future__ import annotations

from arrowbank.bank.remote.addresses import WEB, Address
from arrowbank.bank.remote.stores import Store


def store_of(address: Address) -> Store:
    """The place at `address`. MissingDependency where fsspec needs a package for it."""
    if address.repo:
        from arrowbank.bank.remote.hub import HubStore

        return HubStore(address)
    if address.scheme in WEB:
        from arrowbank.bank.remote.web import WebStore

        return WebStore(address)
    from arrowbank.bank.remote.objects import ObjectStore

    return ObjectStore(address)
