"""The contract between trainer and models, for type checkers alone: when the program runs, no room imports models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.architecture import Architecture, Attend, Head, Hub, LanguageModel, Mixer, ModelArgs

    AnyArchitecture = Architecture[Any]
else:
    AnyArchitecture = Attend = Head = Hub = LanguageModel = Mixer = ModelArgs = Any

__all__ = ["AnyArchitecture", "Attend", "Head", "Hub", "LanguageModel", "Mixer", "ModelArgs"]
