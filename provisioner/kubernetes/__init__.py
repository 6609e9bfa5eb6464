"""Nodes from Kubernetes: one pod for each node, which runs a node agent. The API server knows every pod."""

from collections.abc import Mapping
from typing import Any

from provisioner.context import ProviderContext
from provisioner.core.provider import Provider


def create(config: Mapping[str, Any], context: ProviderContext) -> Provider:
    """`config`: see provisioner.kubernetes.settings. Raises InvalidArgument, ImportError without the client."""
    import kubernetes.client
    from kubernetes.config import load_incluster_config, load_kube_config

    from provisioner.kubernetes.provider import KubernetesProvider
    from provisioner.kubernetes.settings import KubernetesSettings
    from springtide.config import parse

    settings = parse(KubernetesSettings, config, "provider.")
    settings.check()
    if settings.kubeconfig:
        load_kube_config(settings.kubeconfig, context=settings.context or None)  # type: ignore[no-untyped-call]  # no types
    else:
        load_incluster_config()  # type: ignore[no-untyped-call]  # no types
    configuration = kubernetes.client.Configuration.get_default_copy()
    configuration.retries = False  # an outcome that is not known is looked up before anything is repeated
    api = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(configuration))
    return KubernetesProvider(settings, context, api)
