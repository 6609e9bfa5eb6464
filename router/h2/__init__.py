"""The token path over gRPC: `Generate` on an HTTP/2 server of its own; every other method is passed on to grpc.aio."""
