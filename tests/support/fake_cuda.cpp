// The hooks of a machine with one GPU, and a device guard that computes nothing in CUDA's place: autograd asks both. Torch
// makes its hooks at the first question, so this library is loaded before it. A CUDA build sets its own guard after that:
// use_fake_guard takes its place. See fake_cuda.py.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::Device, c10::DeviceIndex, c10::Stream;

constexpr auto CUDA = c10::DeviceType::CUDA;
const Stream STREAM(Stream::DEFAULT, Device(CUDA, 0));

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return STREAM.device(); }
  Device exchangeDevice(Device) const override { return STREAM.device(); }
  Stream getStream(Device) const noexcept override { return STREAM; }
  Stream getDefaultStream(Device) const override { return STREAM; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return STREAM; }
  Stream getNewStream(Device, int) const override { return STREAM; }
  Stream exchangeStream(Stream) const noexcept override { return STREAM; }
  void synchronizeDevice(const DeviceIndex) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
}  // namespace

extern "C" void use_fake_guard() { c10::impl::DeviceGuardImplRegistrar(CUDA, new Guard); }

namespace at {
namespace {
struct Hooks final : CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};
}  // namespace
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}  // namespace at
