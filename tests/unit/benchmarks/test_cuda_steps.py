"""Figures of a step beside its prediction, and how a profile is summed."""

from typing import Any

from benchmarks.cuda_rows import Row
from benchmarks.cuda_steps import figures, sum_by_kind

GIB = 2**30


def test_the_median_step_stands_beside_its_prediction_and_what_others_published() -> None:
    row = Row("packed", "debug", 512, documents=(256, 256), published=800.0)
    lines = [
        {"step_seconds": s, "tokens_per_second": 512 / s, "mfu": 0.4, "mfu_mask": 0.2, "peak_memory_bytes": 3 * GIB}
        for s in (1.0, 0.5, 4.0)
    ]
    predicted = {"predicted_tokens_per_second": 1024.0, "predicted_mfu": 0.5, "predicted_peak_gib": 2.0}
    assert figures(row, lines, predicted) == {
        "ms": 1000.0,
        "tokens_per_second": 512.0,
        "predicted_tokens_per_second": 1024.0,
        "tokens_per_second_of_predicted": 0.5,
        "mfu": 0.2,
        "predicted_mfu": 0.5,
        "peak_gib": 3.0,
        "predicted_peak_gib": 2.0,
        "peak_gib_of_predicted": 1.5,
        "published_tokens_per_second": 800.0,
        "of_published": 0.64,
    }


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1 if cat.startswith(("cpu", "user", "cuda")) else 7,
            "args": args}  # fmt: skip


def test_kernels_are_summed_by_kind_and_copies_named_by_what_launched_them() -> None:
    events = [
        event("user_annotation", "FSDP::all_gather_copy_in", 0, 90),
        event("cpu_op", "fsdp::copy_in", 10, 50),
        event("cpu_op", "aten::copy_", 20, 30),
        event("cuda_runtime", "cudaLaunchKernel", 25, 1, correlation=1),
        event("cpu_op", "aten::to", 100, 20),
        event("cuda_runtime", "cudaMemcpyAsync", 105, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 130, 1, correlation=3),
        event("kernel", "elementwise_kernel<direct_copy_kernel_cuda>", 30, 3000, correlation=1),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 4000, 1000, correlation=2),
        event("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", 5000, 7000, correlation=3),
        event("kernel", "nvjet_tst_128x256_64x4", 12000, 9000, correlation=4),
        event("kernel", "triton_poi_fused__to_copy_mul_0", 21000, 2000, correlation=5),
        event("kernel", "multi_tensor_apply_kernel<FusedAdam>", 23000, 500, correlation=6),
        event("kernel", "reduce_kernel", 24000, 250, correlation=7),
        {"ph": "M", "name": "process_name"},
    ]
    milliseconds, copies = sum_by_kind(events)
    assert milliseconds == {
        "matrix products": 9.0,
        "attention": 7.0,
        "copies": 4.0,
        "compiled elementwise": 2.0,
        "optimizer and norms": 0.5,
        "other kernels": 0.25,
    }
    assert copies == [
        (("elementwise_kernel<direct_copy_kernel_cuda>", "fsdp::copy_in in FSDP::all_gather_copy_in"), (1, 3.0)),
        (("Memcpy DtoD (Device -> Device)", "aten::to"), (1, 1.0)),
    ]
