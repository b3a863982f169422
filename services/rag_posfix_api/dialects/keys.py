"""API keys: list, create and revoke them. Needs a key with the scope ``admin``, which sees all tenants."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import anyio.to_thread
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rag_posfix.errors import UnknownNameError
from rag_posfix_api.dialects.errors import OPENAI
from rag_posfix_api.dialects.requests import WHOLE, RequestModel
from rag_posfix_api.http.clean_json import CleanRoute
from rag_posfix_api.http.errors import NotFoundError
from rag_posfix_api.keys.store import SCOPES, TENANT_PATTERN, ApiKey
from rag_posfix_api.runtime.service import ServiceState

router = APIRouter(tags=["keys"], route_class=CleanRoute)


ScopeName = Literal["read", "write", "admin"]
"""As ``keys.store.SCOPES``."""
Limit = Annotated[int, Field(ge=1, le=1_000_000), WHOLE]


class NewKey(RequestModel):
    """What a new key is to be."""

    model_config = ConfigDict(extra="forbid")

    tenant: str = Field(pattern=TENANT_PATTERN, description="Owner of what the key creates.")
    name: str = Field(
        default="",
        max_length=100,
        description="Printable text for people.",
        # The key file's own rule, with status 400, is wider: all printable characters of Unicode.
        json_schema_extra={"pattern": r"^[ -~]*$"},
    )
    scopes: list[ScopeName] = Field(default=["read"], min_length=1, max_length=len(SCOPES))
    requests_per_minute: Limit | None = None
    max_concurrent: Limit | None = None


class KeyObject(BaseModel):
    """A key, without its secret."""

    id: str
    tenant: str
    name: str
    scopes: list[str]
    requests_per_minute: int | None
    max_concurrent: int | None
    created_at: int
    revoked_at: int | None


class CreatedKey(KeyObject):
    """A new key with its secret, which is shown this once."""

    key: str


class KeyList(BaseModel):
    """All keys, revoked ones included."""

    keys: list[KeyObject]


@router.get(
    "/admin/keys", operation_id="list_keys", response_model=KeyList, responses=OPENAI.responses(401, 403, 429, 500)
)
async def list_keys(service: ServiceState) -> KeyList:
    """List the keys of all tenants, in the order of creation."""
    return KeyList(keys=[_shown(key) for key in service.keys.table().keys.values()])


@router.post(
    "/admin/keys",
    operation_id="create_key",
    response_model=CreatedKey,
    status_code=201,
    responses=OPENAI.responses(400, 401, 403, 413, 422, 429, 500),
)
async def create_key(body: NewKey, service: ServiceState) -> CreatedKey:
    """Create a key. The response has it in ``key``; it is shown this once and kept nowhere."""
    make = partial(
        service.keys.create,
        body.tenant,
        name=body.name,
        scopes=body.scopes,
        requests_per_minute=body.requests_per_minute,
        max_concurrent=body.max_concurrent,
    )
    made, whole = await anyio.to_thread.run_sync(make)
    return CreatedKey(**made.to_dict(), key=whole)


@router.delete(
    "/admin/keys/{key_id}",
    operation_id="revoke_key",
    response_model=KeyObject,
    responses=OPENAI.responses(401, 403, 404, 422, 429, 500),
)
async def revoke_key(key_id: str, service: ServiceState) -> KeyObject:
    """Revoke a key. Its next request is refused; running ones end."""
    try:
        return _shown(await anyio.to_thread.run_sync(service.keys.revoke, key_id))
    except UnknownNameError as error:
        raise NotFoundError(str(error), param="key_id") from error


def _shown(key: ApiKey) -> KeyObject:
    return KeyObject(**key.to_dict())
