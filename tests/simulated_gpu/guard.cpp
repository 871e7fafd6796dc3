// Tells torch, built without CUDA, that there is a device cuda:0. Nothing is ever run on it.
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
