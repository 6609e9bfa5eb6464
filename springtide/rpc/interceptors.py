"""What every call passes on the server: its token is checked, and its errors become documented statuses."""

import hmac
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio
from grpc_status import rpc_status

from springtide.errors import Internal, SpringtideError, Unauthenticated
from springtide.rpc.status import to_status
from springtide.rpc.tokens import PREFIX, JoinTokens, bearer

log = logging.getLogger(__name__)

if TYPE_CHECKING:  # generic in the stubs only
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
else:
    Handler = grpc.RpcMethodHandler
    Context = grpc.aio.ServicerContext
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns SpringtideError into its status with ErrorInfo, and an unexpected exception into INTERNAL, logged."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        behaviour = _behaviour(handler)
        method = handler_call_details.method
        if inspect.isasyncgenfunction(behaviour):
            return _rebuild(handler, _generator(behaviour, method))
        if inspect.iscoroutinefunction(behaviour):
            return _rebuild(handler, _coroutine(behaviour, method))
        return handler


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a known bearer token. Health stays open, so that probes need no secret. A join token opens
    its own service only; whose it is the service checks against the hello. With `required` False a call without a
    token passes (a client certificate stands for it), but a join token that is shown must be good."""

    def __init__(self, tokens: tuple[str, ...], join: JoinTokens | None = None, *, required: bool = True) -> None:
        self._tokens = tuple(token.encode() for token in tokens)
        self._join = join
        self._required = required

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc.health.v1.Health/"):
            return handler
        error = self._refusal(handler_call_details)
        if error is None:
            return handler
        if handler.response_streaming:
            return _rebuild(handler, _refuse_stream(error))
        return _rebuild(handler, _refuse_call(error))

    def _refusal(self, details: grpc.HandlerCallDetails) -> SpringtideError | None:
        shown = bearer(details.invocation_metadata)
        if self._join is not None and shown.startswith(PREFIX):
            try:
                token = self._join.read(shown)
            except SpringtideError as error:
                return error
            if not token.opens(details.method):
                return Unauthenticated(
                    f"A join token of a {token.kind} does not open {details.method}.",
                    reason="JOIN_TOKEN_OF_ANOTHER",
                    remedy="Use a token of the control plane's token_file.",
                )
            return None
        if not self._required or self._accepts(dict(details.invocation_metadata)):
            return None
        return no_token()

    def _accepts(self, metadata: dict[str, str | bytes]) -> bool:
        header = metadata.get("authorization", "")
        return accepts_token(self._tokens, header.decode(errors="replace") if isinstance(header, bytes) else header)


def accepts_token(tokens: tuple[bytes, ...], authorization: str) -> bool:
    """Whether the value of `authorization` carries one of the tokens."""
    scheme, _, token = authorization.partition(" ")
    given = token.strip().encode()
    return scheme.lower() == "bearer" and any(hmac.compare_digest(given, known) for known in tokens)


def no_token() -> Unauthenticated:
    """What a call without a known token gets."""
    return Unauthenticated(
        "The call carries no token that this server knows.",
        remedy="Send metadata `authorization: Bearer TOKEN` (SPRINGTIDE_TOKEN) with a token of its token_file.",
    )


def _behaviour(handler: Handler) -> Callable[..., Any]:
    found = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    assert found is not None
    return found


def _rebuild(handler: Handler, behaviour: Callable[..., Any]) -> Handler:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make: Any = kinds[(handler.request_streaming, handler.response_streaming)]
    made: Handler = make(
        behaviour, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
    return made


def _generator(behaviour: Callable[..., Any], method: str) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 - every fault becomes a status
            await _abort(context, error, method)

    return call


def _coroutine(behaviour: Callable[..., Any], method: str) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001 - every fault becomes a status
            await _abort(context, error, method)

    return call


async def _abort(context: Context, error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, SpringtideError):
        log.error("%s failed", method, exc_info=error)
        error = Internal(
            f"{method} failed: {type(error).__name__}.", remedy="This is a fault of ours: see the server's log."
        )
    await context.abort_with_status(rpc_status.to_status(to_status(error)))


def _refuse_call(error: SpringtideError) -> Callable[[Any, Context], Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))

    return call


def _refuse_stream(error: SpringtideError) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        await _abort(context, error, "")
        yield None  # makes it a generator; never reached

    return call
