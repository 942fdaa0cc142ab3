"""Days a model was not trained on: a model with a layer for one more, or as one day reads it.

A model without session layers gets them at the identity, which changes nothing, so that every kind of encoder can
take a new day in the same way.
"""

import copy

import torch
from torch import Tensor

from arcuate.errors import UserError
from arcuate.models.model import Model
from arcuate.models.session_layer import SessionLayer
from arcuate.models.settings import ModelCard, ModelSettings


def layer_of(model: Model, like: str) -> tuple[Tensor, Tensor]:
    """Weight (C, C) and bias (C,) of a known session, or of their mean for "mean"; a copy."""
    layer = model.front_end.session_layer
    device = model.head.weight.device
    if not layer.settings.enabled:
        n = model.card.n_channels
        return torch.eye(n, device=device), torch.zeros(n, device=device)
    with torch.no_grad():
        if like == "mean":
            return torch.stack(list(layer.weights)).mean(0), torch.stack(list(layer.biases)).mean(0)
        index = model.card.sessions.index(like)
        return layer.weights[index].detach().clone(), layer.biases[index].detach().clone()


def with_layers(settings: ModelSettings) -> ModelSettings:
    """The same settings with session layers switched on."""
    layer = settings.front_end.session_layer.model_copy(update={"enabled": True})
    front_end = settings.front_end.model_copy(update={"session_layer": layer})
    return settings.model_copy(update={"front_end": front_end})


def with_session(model: Model, session: str, like: str) -> Model:
    """A model of its own that knows one session more, whose layer starts as that of `like` (or the mean)."""
    if session in model.card.sessions:
        raise UserError(f"the model knows session {session} already")
    layers = [layer_of(model, known) for known in model.card.sessions] + [layer_of(model, like)]
    return _replace_layers(copy.deepcopy(model), (*model.card.sessions, session), layers)


def one_day(model: Model, session: str, weight: Tensor, bias: Tensor) -> Model:
    """The model as one day reads it: session 0 has this layer; all other weights are shared with the model."""
    shared = copy.copy(model)
    shared._modules = dict(model._modules)
    shared.front_end = copy.copy(model.front_end)
    shared.front_end._modules = dict(model.front_end._modules)
    return _replace_layers(shared, (session,), [(weight, bias)])


def _replace_layers(model: Model, sessions: tuple[str, ...], layers: list[tuple[Tensor, Tensor]]) -> Model:
    old = model.front_end.session_layer
    settings = with_layers(model.card.settings)
    model.card = ModelCard(
        settings=settings, n_channels=model.card.n_channels, sessions=sessions, classes=model.card.classes
    )
    with torch.device("meta"):
        new = SessionLayer(settings.front_end.session_layer, model.card.n_channels, len(sessions))
    new.weights = torch.nn.ParameterList(torch.nn.Parameter(weight) for weight, _ in layers)
    new.biases = torch.nn.ParameterList(torch.nn.Parameter(bias) for _, bias in layers)
    new.layer_norm = old.layer_norm
    model.front_end.settings = settings.front_end
    model.front_end.session_layer = new.train(old.training)
    return model
