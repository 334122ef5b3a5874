"""Decides which calls a client may make: one place for gRPC, HTTP and the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import unquote

from offramp.engine.common.network import is_loopback
from offramp.server.arguments.options import SecurityOptions
from offramp.server.common.errors import ForbiddenError, UnauthenticatedError
from offramp.server.security.tokens import Principal, TokenFile

OPEN_METHODS: Final = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
"""Methods that need no token: health probes, including gRPC's health service."""

ADMIN_METHODS: Final = frozenset(
    {
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "TraceSetting",
        "LogSettings",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    }
)
"""Methods that change the server or its models."""

_PUBLIC: Final = frozenset({"ServerMetadata", "ServerReflectionInfo"})
"""Methods that reveal nothing about models."""

_MODEL_FIELDS: Final = {
    "ModelReady": "name",
    "ModelMetadata": "name",
    "ModelConfig": "name",
    "ModelStatistics": "name",
    "RepositoryModelLoad": "model_name",
    "RepositoryModelUnload": "model_name",
    "TraceSetting": "model_name",
}
"""Field with the model's name, for methods that concern one model."""

_SCHEME: Final = "bearer"
_HOW: Final = "send the header 'authorization: Bearer TOKEN'"


class AccessRules:
    """Checks tokens against the token files, and calls against the rights of each token."""

    def __init__(self, options: SecurityOptions | None = None) -> None:
        """Read the files, or raise StartError."""
        options = options or SecurityOptions()
        users, admins = options.token_file, options.admin_token_file
        self._users = None if users is None else TokenFile(users)
        self._admins = None if admins is None else TokenFile(admins, admin=True)

    @property
    def uses_tokens(self) -> bool:
        """True if there is a token file."""
        return self._users is not None or self._admins is not None

    def admit(self, method: str, peer: str, authorization: Sequence[str]) -> Principal | None:
        """Return the principal of a call's token; ``None`` if the call needs none.

        Args:
            method: Name of the method.
            peer: Caller's address in gRPC's notation.
            authorization: Values of the call's authorization headers.

        Raises:
            UnauthenticatedError: There is no valid token.
            ForbiddenError: The token does not allow this method.
        """
        if method in OPEN_METHODS:
            return None
        principal = self.identify(authorization)
        self.check_method(principal, method, peer)
        return principal

    def identify(self, authorization: Sequence[str]) -> Principal | None:
        """Return the token's principal (``None``: none needed), or raise UnauthenticatedError."""
        if not self.uses_tokens:
            return None
        if not authorization:
            if self._users is None:
                return None
            raise UnauthenticatedError(f"a token is needed; {_HOW}")
        scheme, _, token = authorization[0].partition(" ")
        if len(authorization) > 1 or scheme.lower() != _SCHEME:
            raise UnauthenticatedError(f"the authorization is not one bearer token; {_HOW}")
        found = [each for file in self._files() if (each := file.find(token.strip())) is not None]
        if not found:
            raise UnauthenticatedError("the token is not valid; ask the server's operator for one")
        return found[-1]

    def check_method(self, principal: Principal | None, method: str, peer: str) -> None:
        """Check the right to a method; raise UnauthenticatedError or ForbiddenError without it."""
        if method in OPEN_METHODS:
            return
        if method in ADMIN_METHODS:
            self._check_admin(principal, method, peer)
        elif self._users is not None and principal is None:
            raise UnauthenticatedError(f"{method} needs a token; {_HOW}")

    def check_message(self, principal: Principal | None, method: str, message: Any) -> None:
        """Raise ForbiddenError for a request about a model, or all models, that the token excludes.

        Inference requests are checked by :meth:`check_model`.
        """
        if principal is None or principal.models is None or method in _PUBLIC | OPEN_METHODS:
            return
        field = _MODEL_FIELDS.get(method)
        model = "" if field is None else getattr(message, field)
        if model:
            _check_name(principal, model)
        else:
            self.check_all_models(principal, method)

    def check_model(self, principal: Principal | None, model: str) -> None:
        """Refuse an inference request without the right to its model.

        Raises:
            UnauthenticatedError: The token was revoked after its stream was opened.
            ForbiddenError: The token is for other models.
        """
        if principal is None:
            return
        if not any(file.has(principal) for file in self._files()):
            raise UnauthenticatedError(f"token {principal.name!r} was revoked")
        _check_name(principal, model)

    def check_all_models(self, principal: Principal | None, what: str) -> None:
        """Raise ForbiddenError for a method about all models if the token is for some only."""
        if principal is not None and principal.models is not None:
            raise ForbiddenError(
                f"{what} concerns more than one model, and {_described(principal)}; use a token "
                "without models"
            )

    def _check_admin(self, principal: Principal | None, method: str, peer: str) -> None:
        if not self.uses_tokens:
            if not is_local(peer):
                raise ForbiddenError(
                    f"{method} changes the server, which is allowed from its own machine only; for "
                    "others, start it with --admin-token-file"
                )
        elif principal is None:
            raise UnauthenticatedError(f"{method} needs a token of --admin-token-file; {_HOW}")
        elif not principal.admin:
            raise ForbiddenError(
                f"{method} changes the server, and token {principal.name!r} may not; use one of "
                "--admin-token-file"
            )

    def _files(self) -> list[TokenFile]:
        return [file for file in (self._users, self._admins) if file is not None]


def is_local(peer: str) -> bool:
    """Return whether a caller's address, in gRPC's notation, is on this machine."""
    kind, _, address = unquote(peer).partition(":")
    return kind == "unix" or is_loopback(address.rpartition(":")[0].strip("[]"))


def _check_name(principal: Principal, model: str) -> None:
    if principal.models is not None and model not in principal.models:
        raise ForbiddenError(f"model {model!r:.128} is refused: {_described(principal)}")


def _described(principal: Principal) -> str:
    return f"token {principal.name!r} is for {', '.join(sorted(principal.models or ()))} alone"
