"""Horovod's Gloo ranks on this machine: local workers with a rendezvous store in the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from tfdistkit import env
from tfdistkit.cluster.environments import horovod
from tfdistkit.cluster.rendezvous.gloo_store import GlooStore
from tfdistkit.launcher.local import backend as local
from tfdistkit.launcher.spec import ProcessSpec


class Launcher(local.Launcher):
    """Starts Gloo ranks (see `backend.Backend`)."""

    def __init__(self, job_id: str, world_size: int):
        super().__init__(job_id, world_size)
        self._store = GlooStore(world_size)

    def own_variables(self, spec: ProcessSpec) -> Mapping[str, str | None]:
        host, port = self._store.address
        return {
            env.TF_CONFIG: None,  # a TF_CONFIG of the shell describes another cluster
            **horovod.store_variables(host, port, self._store.secret),
        }

    def close(self) -> None:
        super().close()
        self._store.close()
