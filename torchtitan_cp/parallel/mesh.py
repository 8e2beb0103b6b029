"""Meshes of a run: one that shards the parameters for good, and one for each context-parallel degree."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Meshes:
    """Hands out meshes over all ranks of the job.

    Parameters are sharded over the flattened (dp_shard, cp) ranks, whose product no stage changes; a
    stage with another CP degree only gets other groups, made when it starts and kept.

    Args:
        device_type: "cpu" or "cuda".
        fsdp: ranks the parameters are sharded over: all of them in this version.
    """

    def __init__(self, device_type: str, fsdp: int) -> None:
        self.device_type, self.fsdp_degree = device_type, fsdp
        self.fsdp = init_device_mesh(device_type, (fsdp,), mesh_dim_names=("fsdp",))
        self._by_cp: dict[int, DeviceMesh] = {}
        self._hybrid: dict[tuple[int, int], DeviceMesh] = {}

    def for_cp(self, degree: int) -> DeviceMesh:
        """The 2-D mesh (dp, cp) with this CP degree; neighbours in rank share a sequence. Collective."""
        if degree not in self._by_cp:
            shape = (self.fsdp_degree // degree, degree)
            self._by_cp[degree] = init_device_mesh(self.device_type, shape, mesh_dim_names=("dp", "cp"))
        return self._by_cp[degree]

    def for_hybrid(self, degree: int, all_to_all_ranks: int) -> DeviceMesh:
        """The same CP ranks as a 2-D mesh (ring, all-to-all), for the hybrid exchange. Collective."""
        key = (degree, all_to_all_ranks)
        if key not in self._hybrid:
            shape = (self.fsdp_degree // degree, degree // all_to_all_ranks, all_to_all_ranks)
            names = ("dp", "ring", "all_to_all")
            self._hybrid[key] = init_device_mesh(self.device_type, shape, mesh_dim_names=names)
        return self._hybrid[key]["ring", "all_to_all"]
