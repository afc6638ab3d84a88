"""Which experts every token was routed to, as the engines report it: files of rows, and references to them.

Rows never travel with samples: client workers write them, references travel, and the ranks that need rows read them.
Nothing but numpy and files is known here.
"""

from .store import RoutePart, RoutesError, RouteStore, StoredRoutes

__all__ = ["RoutePart", "RouteStore", "RoutesError", "StoredRoutes"]
