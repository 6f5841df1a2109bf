//! The device that a backend runs on.

use std::str::FromStr;

use candle_core::Device;
use stolon_checkpoint::ModelError;

use crate::OpenError;
#[cfg(feature = "cuda-core")]
use crate::memory;
use crate::options::message;

/// A device by its name: `cpu`, `cuda`, `cuda:1`, `metal` or `metal:1`. Without a number it is the
/// first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The CPU, through candle. It is slower than the CPU backend of `stolon-cpu` and is meant
    /// for tests.
    #[default]
    Cpu,
    /// The NVIDIA GPU with this index.
    Cuda(usize),
    /// The Apple GPU with this index.
    Metal(usize),
}

impl DeviceChoice {
    /// Opens the device. Call it on the thread that will use the device.
    ///
    /// # Errors
    /// [`OpenError::Device`] if there is no such device, or if this build does not support it.
    pub fn open(self) -> Result<Device, OpenError> {
        let unavailable = |reason: String| OpenError::Device { device: self.to_string(), reason };
        let without = |feature: &str| {
            unavailable(format!("this program was built without the feature `{feature}`"))
        };
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(_) if !cfg!(feature = "cuda-core") => Err(without("cuda")),
            Self::Metal(_) if !cfg!(feature = "metal") => Err(without("metal")),
            Self::Cuda(index) => {
                let device =
                    Device::new_cuda(index).map_err(|error| unavailable(message(&error)))?;
                #[cfg(feature = "cuda-core")]
                memory::prepare(&device).map_err(|error| unavailable(message(&error)))?;
                Ok(device)
            }
            Self::Metal(index) => {
                Device::new_metal(index).map_err(|error| unavailable(message(&error)))
            }
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = ModelError;

    fn from_str(name: &str) -> Result<Self, ModelError> {
        let expected = "`cpu`, `cuda`, `cuda:INDEX`, `metal` or `metal:INDEX`";
        let invalid = || ModelError::option("device", expected, format!("`{name}`"));
        let (kind, index) = match name.split_once(':') {
            None => (name, 0),
            Some((kind, index)) => (kind, index.parse().map_err(|_| invalid())?),
        };
        match kind {
            "cpu" if !name.contains(':') => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(index)),
            "metal" => Ok(Self::Metal(index)),
            _ => Err(invalid()),
        }
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Metal(index) => write!(f, "metal:{index}"),
        }
    }
}
