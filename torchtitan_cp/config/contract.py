"""The contract between trainer and models, for type checkers alone: when the program runs, no room imports models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.architecture import (
        Architecture,
        Attend,
        Head,
        Hub,
        HubConfig,
        LanguageModel,
        Mixer,
        ModelArgs,
        ReadShard,
        StoredTensor,
    )

    AnyArchitecture = Architecture[Any]
else:
    AnyArchitecture = Attend = Head = Hub = HubConfig = LanguageModel = Mixer = ModelArgs = Any
    ReadShard = StoredTensor = Any

__all__ = [
    "AnyArchitecture",
    "Attend",
    "Head",
    "Hub",
    "HubConfig",
    "LanguageModel",
    "Mixer",
    "ModelArgs",
    "ReadShard",
    "StoredTensor",
]
