"""The message classes of ``inference.proto``; ``messages.pyi`` gives their fields."""

from offramp.proto.descriptors import FILE, message_class

DESCRIPTOR = FILE

InferParameter = message_class("InferParameter")
InferTensorContents = message_class("InferTensorContents")
ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
ModelMetadataRequest = message_class("ModelMetadataRequest")
ModelMetadataResponse = message_class("ModelMetadataResponse")
ModelReadyRequest = message_class("ModelReadyRequest")
ModelReadyResponse = message_class("ModelReadyResponse")
ServerLiveRequest = message_class("ServerLiveRequest")
ServerLiveResponse = message_class("ServerLiveResponse")
ServerMetadataRequest = message_class("ServerMetadataRequest")
ServerMetadataResponse = message_class("ServerMetadataResponse")
ServerReadyRequest = message_class("ServerReadyRequest")
ServerReadyResponse = message_class("ServerReadyResponse")
