//! The driver's pool, from which candle allocates the memory of a CUDA device.

#![allow(unsafe_code, reason = "cudarc has no safe functions for the pool")]

use std::ffi::c_void;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::cuda_backend::{CudaDevice, WrapErr};

/// The pool of a device.
pub(super) struct Pool(sys::CUmemoryPool);

/// Configures a device for steps, each of which allocates and frees hundreds of tensors.
pub(super) fn prepare(device: &CudaDevice) -> Result<()> {
    // SAFETY: a device has one stream, which runs launches in order. A tensor is therefore never
    // used before earlier work on it has ended, and no events are needed to wait for that.
    unsafe { device.disable_event_tracking() };
    // By default, the pool returns all free memory to the driver whenever the host waits for the
    // device, which it does in each step.
    let pool = Pool::of(device)?;
    pool.map_or(Ok(()), |pool| pool.set(THRESHOLD, u64::MAX))
}

/// The attribute with the number of bytes that the pool keeps when the host waits for the device.
const THRESHOLD: sys::CUmemPool_attribute =
    sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;

impl Pool {
    /// The pool of `device`. `None` if the device has no pool and memory is allocated directly.
    pub(super) fn of(device: &CudaDevice) -> Result<Option<Self>> {
        let context = device.cuda_stream().context().clone();
        if !context.has_async_alloc() {
            return Ok(None);
        }
        context.bind_to_thread().w()?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the function writes a handle to `pool`. The pool lives as long as the context.
        unsafe { sys::cuDeviceGetMemPool(&raw mut pool, context.cu_device()) }.result().w()?;
        Ok(Some(Pool(pool)))
    }

    /// The memory in bytes that the pool has reserved on the device.
    pub(super) fn reserved(&self) -> Result<u64> {
        self.attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
    }

    /// The largest value of [`Self::reserved`] since the peak was reset.
    pub(super) fn peak(&self) -> Result<u64> {
        self.attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
    }

    /// Resets the peak to the memory that is reserved now.
    pub(super) fn reset_peak(&self) -> Result<()> {
        // 0 is the only value that the driver accepts.
        self.set(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0)
    }

    /// The memory in bytes that the pool has reserved and that no tensor uses.
    pub(super) fn unused(&self) -> Result<u64> {
        let used = self.attribute(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        Ok(self.reserved()?.saturating_sub(used))
    }

    /// Returns all memory that no tensor uses to the device.
    pub(super) fn trim(&self) -> Result<()> {
        // SAFETY: the pool lives as long as the context.
        unsafe { sys::cuMemPoolTrimTo(self.0, 0) }.result().w()
    }

    fn set(&self, name: sys::CUmemPool_attribute, mut number: u64) -> Result<()> {
        let value = (&raw mut number).cast::<c_void>();
        // SAFETY: the attributes that this is called with are numbers of 64 bits, which the
        // function reads from `value`.
        unsafe { sys::cuMemPoolSetAttribute(self.0, name, value) }.result().w()
    }

    fn attribute(&self, name: sys::CUmemPool_attribute) -> Result<u64> {
        let mut bytes = 0_u64;
        let value = (&raw mut bytes).cast::<c_void>();
        // SAFETY: the attributes that this is called with are numbers of 64 bits, which the
        // function writes to `value`.
        unsafe { sys::cuMemPoolGetAttribute(self.0, name, value) }.result().w()?;
        Ok(bytes)
    }
}
