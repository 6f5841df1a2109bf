//! The properties of a device, and how fast it copies memory and multiplies matrices. A speed
//! report compares its measurements with these limits.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};

use crate::{ComputeType, DeviceChoice, OpenError, memory};

/// Minimum duration of a measurement in seconds.
const MEASURED_SECONDS: f64 = 0.3;

/// A device, as it describes itself. Properties that it does not report are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's name, such as `NVIDIA H100 80GB HBM3`.
    pub name: Option<String>,
    /// Size of the memory in bytes.
    pub memory_bytes: Option<u64>,
    /// Memory in bytes that no program uses.
    pub free_memory_bytes: Option<u64>,
    /// CUDA's compute capability, such as `9.0`.
    pub compute_capability: Option<String>,
    /// Number of streaming multiprocessors of a CUDA device.
    pub multiprocessors: Option<u32>,
    /// The version of the NVIDIA driver, as Linux shows it.
    pub driver: Option<String>,
}

impl DeviceChoice {
    /// Opens the device and returns its properties.
    ///
    /// # Errors
    /// [`OpenError::Device`] if there is no such device, or if this build does not support it.
    pub fn info(self) -> Result<DeviceInfo, OpenError> {
        let device = self.open()?;
        let memory = memory::of(&device);
        let mut info = DeviceInfo {
            // On the CPU, only the free memory is known.
            memory_bytes: memory.filter(|_| !device.is_cpu()).map(|memory| memory.total),
            free_memory_bytes: memory.map(|memory| memory.free),
            ..DeviceInfo::default()
        };
        match &device {
            Device::Cpu => info.name = cpu_name(),
            #[cfg(feature = "cuda-core")]
            Device::Cuda(device) => {
                let context = device.cuda_stream().context().clone();
                info.name = context.name().ok();
                let version = context.compute_capability().ok();
                info.compute_capability = version.map(|(major, minor)| format!("{major}.{minor}"));
                let attribute = candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute
                    ::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
                let count = context.attribute(attribute).ok();
                info.multiprocessors = count.and_then(|count| u32::try_from(count).ok());
                info.driver = nvidia_driver();
            }
            _ => {}
        }
        Ok(info)
    }

    /// Measures how fast the device copies its own memory, in bytes per second. Each copied byte
    /// counts twice, because it is read and written. Each copy has `bytes` bytes, which should be
    /// much more than the size of the device's caches.
    ///
    /// # Errors
    /// If the device cannot be opened, or does not have twice `bytes` of free memory.
    pub fn copy_speed(self, bytes: usize) -> Result<f64, OpenError> {
        let device = self.open()?;
        let source = Tensor::ones(bytes.div_ceil(4), DType::F32, &device)?;
        let copies_per_second = per_second(&device, || source.copy().map(drop))?;
        Ok(2.0 * 4.0 * source.elem_count() as f64 * copies_per_second)
    }

    /// Measures the product of two square matrices with `size` rows and columns of the type
    /// `compute_type`, in floating-point operations per second.
    ///
    /// # Errors
    /// If the device cannot be opened, does not support the type, or has too little free memory.
    pub fn product_speed(self, compute_type: ComputeType, size: usize) -> Result<f64, OpenError> {
        let device = self.open()?;
        // Some devices multiply matrices of equal numbers faster, because these use less power.
        let matrix = Tensor::randn(0_f32, 1.0, (size, size), &device)?;
        let matrix = matrix.to_dtype(compute_type.dtype())?;
        let products_per_second = per_second(&device, || matrix.matmul(&matrix).map(drop))?;
        Ok(2.0 * (size as f64).powi(3) * products_per_second)
    }
}

/// Number of runs of `work` per second, after a first run that is not measured. On a GPU, several
/// runs are launched before the host waits for the device.
fn per_second(
    device: &Device,
    mut work: impl FnMut() -> candle_core::Result<()>,
) -> Result<f64, OpenError> {
    let batch = if device.is_cpu() { 1 } else { 8 };
    work()?;
    device.synchronize()?;
    let (start, mut count) = (Instant::now(), 0);
    loop {
        for _ in 0..batch {
            work()?;
        }
        device.synchronize()?;
        count += batch;
        let seconds = start.elapsed().as_secs_f64();
        if seconds >= MEASURED_SECONDS {
            return Ok(f64::from(count) / seconds);
        }
    }
}

/// The name of the CPU, on Linux.
fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_owned())
}

/// The first line of the kernel module's description of itself, on Linux.
#[cfg(feature = "cuda-core")]
fn nvidia_driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let line = text.lines().next()?;
    Some(line.trim_start_matches("NVRM version:").split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: speeds are positive and finite, and a device that does not exist is an error.
    #[test]
    fn the_cpu_is_measured() {
        let cpu = DeviceChoice::Cpu;
        let copies = cpu.copy_speed(1 << 20).expect("memory");
        let products = cpu.product_speed(ComputeType::F32, 64).expect("memory");
        assert!(copies.is_finite() && copies > 0.0 && products.is_finite() && products > 0.0);
        assert_eq!(cpu.info().expect("the CPU").compute_capability, None);
        assert!(DeviceChoice::Metal(9).info().is_err());
    }
}
