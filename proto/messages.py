"""The message classes of ``inference.proto``; ``messages.pyi`` gives their fields."""

from offramp.proto.descriptors import FILE, message_class

DESCRIPTOR = FILE

InferParameter = message_class("InferParameter")
InferTensorContents = message_class("InferTensorContents")
ModelConfig = message_class("ModelConfig")
ModelConfigRequest = message_class("ModelConfigRequest")
ModelConfigResponse = message_class("ModelConfigResponse")
ModelInferRequest = message_class("ModelInferRequest")
ModelInferResponse = message_class("ModelInferResponse")
ModelInput = message_class("ModelInput")
ModelMetadataRequest = message_class("ModelMetadataRequest")
ModelMetadataResponse = message_class("ModelMetadataResponse")
ModelOutput = message_class("ModelOutput")
ModelReadyRequest = message_class("ModelReadyRequest")
ModelReadyResponse = message_class("ModelReadyResponse")
ModelStreamInferResponse = message_class("ModelStreamInferResponse")
ModelTransactionPolicy = message_class("ModelTransactionPolicy")
ServerLiveRequest = message_class("ServerLiveRequest")
ServerLiveResponse = message_class("ServerLiveResponse")
ServerMetadataRequest = message_class("ServerMetadataRequest")
ServerMetadataResponse = message_class("ServerMetadataResponse")
ServerReadyRequest = message_class("ServerReadyRequest")
ServerReadyResponse = message_class("ServerReadyResponse")
