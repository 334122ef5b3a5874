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
ModelDynamicBatching = message_class("ModelDynamicBatching")
ModelInput = message_class("ModelInput")
ModelInstanceGroup = message_class("ModelInstanceGroup")
ModelMetadataRequest = message_class("ModelMetadataRequest")
ModelMetadataResponse = message_class("ModelMetadataResponse")
ModelOptimizationPolicy = message_class("ModelOptimizationPolicy")
ModelOutput = message_class("ModelOutput")
ModelParameter = message_class("ModelParameter")
ModelReadyRequest = message_class("ModelReadyRequest")
ModelReadyResponse = message_class("ModelReadyResponse")
ModelStreamInferResponse = message_class("ModelStreamInferResponse")
ModelTensorReshape = message_class("ModelTensorReshape")
ModelTransactionPolicy = message_class("ModelTransactionPolicy")
ModelVersionPolicy = message_class("ModelVersionPolicy")
ModelWarmup = message_class("ModelWarmup")
ServerLiveRequest = message_class("ServerLiveRequest")
ServerLiveResponse = message_class("ServerLiveResponse")
ServerMetadataRequest = message_class("ServerMetadataRequest")
ServerMetadataResponse = message_class("ServerMetadataResponse")
ServerReadyRequest = message_class("ServerReadyRequest")
ServerReadyResponse = message_class("ServerReadyResponse")
