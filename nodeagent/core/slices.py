"""GPU slices: disjoint, of exactly tensor_parallel_size GPUs each (acceptance NA1, NA2).

GPU ids are names: indexes, UUIDs or MIG names, as the engine's visible-devices variable takes them.
"""

from collections.abc import Collection, Mapping, Sequence

from springtide.errors import InvalidArgument


def check_slice(
    wanted: Sequence[str],
    tensor_parallel_size: int,
    present: Collection[str],
    taken: Mapping[str, str],
) -> None:
    """Whether a worker may have the GPUs `wanted`. `present`: the node's; `taken`: GPU id to the live worker with it.

    Raises InvalidArgument with reason SLICE_SIZE, GPU_NOT_AVAILABLE or GPU_IN_USE. On a node without GPUs an empty
    slice is a worker that runs on the CPU.
    """
    _check_size(tensor_parallel_size)
    if not wanted and not present:
        return
    listed = ",".join(wanted)
    if len(wanted) != tensor_parallel_size or len(set(wanted)) != len(wanted):
        raise InvalidArgument(
            field="gpu_ids",
            value=listed,
            problem=f"is not {tensor_parallel_size} different GPUs",
            remedy="A worker has exactly tensor_parallel_size GPUs.",
            reason="SLICE_SIZE",
        )
    missing = [gpu for gpu in wanted if gpu not in present]
    if missing:
        raise InvalidArgument(
            field="gpu_ids",
            value=listed,
            problem=f"GPU {', '.join(missing)} is not on this node",
            remedy=f"This node has {', '.join(sorted(present)) or 'no GPU'}; see CUDA_VISIBLE_DEVICES or --gpus.",
            reason="GPU_NOT_AVAILABLE",
        )
    collisions = [f"{gpu} ({taken[gpu]})" for gpu in wanted if gpu in taken]
    if collisions:
        raise InvalidArgument(
            field="gpu_ids",
            value=listed,
            problem=f"is in use: {', '.join(collisions)}",
            remedy="Stop that worker first, or use other GPUs.",
            reason="GPU_IN_USE",
        )


def _check_size(tensor_parallel_size: int) -> None:
    if tensor_parallel_size < 1:
        raise InvalidArgument(
            field="tensor_parallel_size",
            value=tensor_parallel_size,
            problem="must be at least 1",
            remedy="Set tensor_parallel_size to a divisor of the node's GPUs.",
        )
