// A CUDA device that computes nothing, for a CPU build of PyTorch: a device guard, so that fake
// 'cuda' tensors can be moved, and hooks that report one device, which autograd asks for.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using namespace c10;
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device device() const { return Device(DeviceType::CUDA, 0); }
  Stream stream() const { return Stream(Stream::DEFAULT, device()); }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace
namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
using at::CUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
