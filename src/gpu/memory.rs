//! Memory of a GPU and page-locked memory of the host.

use super::Device;
use crate::error::{Error, Result};
use crate::sync;
use cudarc::driver::{CudaContext, result, sys};
use std::sync::Arc;

impl Device {
    /// Device memory, not initialised. The driver aligns it to at least 256 bytes.
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer> {
        self.bind()?;
        // SAFETY: the context is current; the buffer owns the allocation and frees it once.
        let ptr = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(|e| match e.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::device(
                self,
                format!(
                    "{bytes} bytes of device memory wanted, {} of {} are free",
                    self.free_memory().unwrap_or(0),
                    self.info.memory
                ),
            ),
            _ => self.failed("allocate device memory", e),
        })?;
        Ok(DeviceBuffer { device: self.clone(), ptr, len: bytes })
    }

    /// Page-locked host memory, cached (not write-combined: that is slow to read), initialised.
    pub fn alloc_pinned(&self, bytes: usize) -> Result<PinnedBuffer> {
        self.bind()?;
        // Portable: any GPU's context may copy from it.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is current; the buffer owns the allocation and frees it once.
        let ptr = unsafe { result::malloc_host(bytes.max(1), flags) }
            .map_err(|e| self.failed("allocate page-locked host memory", e))?
            .cast::<u8>();
        // SAFETY: `ptr` is the start of `bytes` writable bytes.
        unsafe { ptr.write_bytes(0, bytes) };
        Ok(PinnedBuffer { context: self.context.clone(), ptr, len: bytes })
    }

    /// As [`Device::alloc_pinned`], from the buffers given back before when one has that length; its
    /// contents are then what they were.
    pub fn take_pinned(&self, bytes: usize) -> Result<PinnedBuffer> {
        let mut spare = sync::lock(&self.spare);
        match spare.iter().position(|b| b.len == bytes) {
            Some(i) => Ok(spare.swap_remove(i)),
            None => {
                drop(spare);
                self.alloc_pinned(bytes)
            }
        }
    }

    /// Keeps `buffer`, which nothing copies from or to, for the next [`Device::take_pinned`] of its
    /// length; buffers of other lengths are freed.
    pub fn give_pinned(&self, buffer: PinnedBuffer) {
        let mut spare = sync::lock(&self.spare);
        spare.retain(|b| b.len == buffer.len);
        spare.push(buffer);
    }

    /// Bytes per second of copies from page-locked memory: the limit of the link.
    pub fn pinned_copy_rate(&self) -> Result<f64> {
        const SIZE: usize = 64 << 20;
        const COPIES: u32 = 48;
        let host = self.alloc_pinned(SIZE)?;
        let memory = self.alloc(SIZE)?;
        let stream = self.stream()?;
        let (start, end) = (self.event(true)?, self.event(true)?);
        for i in 0..=COPIES {
            // SAFETY: both buffers are of that size and outlive the synchronisation below.
            unsafe { stream.copy_to_device(memory.ptr(), host.as_ptr(), SIZE)? };
            if i == 0 {
                stream.record(&start)?; // the first copy warms up
            }
        }
        stream.record(&end)?;
        stream.synchronize()?;
        Ok(f64::from(COPIES) * SIZE as f64 / end.seconds_since(&start)?)
    }
}

/// Device memory, freed when dropped.
pub struct DeviceBuffer {
    device: Device,
    ptr: sys::CUdeviceptr,
    len: usize,
}

impl DeviceBuffer {
    /// Its address on the device.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }
    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
    /// The GPU it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }
    /// Copies `host` to byte `offset`, and waits.
    ///
    /// # Panics
    /// When the range ends past the buffer.
    pub fn write(&mut self, offset: usize, host: &[u8]) -> Result<()> {
        assert!(offset.checked_add(host.len()).is_some_and(|end| end <= self.len));
        self.device.bind()?;
        // SAFETY: the range lies inside this allocation, whose context is current.
        unsafe { result::memcpy_htod_sync(self.ptr + offset as u64, host) }
            .map_err(|e| self.device.failed("copy to the GPU", e))
    }
    /// Copies from byte `offset` to `host`, and waits. Other streams' work is not waited for.
    ///
    /// # Panics
    /// When the range ends past the buffer.
    pub fn read(&self, offset: usize, host: &mut [u8]) -> Result<()> {
        assert!(offset.checked_add(host.len()).is_some_and(|end| end <= self.len));
        self.device.bind()?;
        // SAFETY: the range lies inside this allocation, whose context is current.
        unsafe { result::memcpy_dtoh_sync(host, self.ptr + offset as u64) }
            .map_err(|e| self.device.failed("copy from the GPU", e))
    }
    /// Sets every byte to `value`, and waits.
    pub fn fill(&mut self, value: u8) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the range is this allocation, whose context is current.
        unsafe { result::memset_d8_sync(self.ptr, value, self.len) }
            .map_err(|e| self.device.failed("fill device memory", e))?;
        self.device.synchronize()
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: allocated in `alloc`, freed here alone. A failure leaves the memory to the
            // context's end; there is nobody to tell.
            let _ = unsafe { result::free_sync(self.ptr) };
        }
    }
}

/// Page-locked host memory, freed when dropped. Aligned to a page.
pub struct PinnedBuffer {
    context: Arc<CudaContext>,
    ptr: *mut u8,
    len: usize,
}

// SAFETY: plain memory owned by the value; no thread affinity.
unsafe impl Send for PinnedBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// A part of it for one of several threads that write to it at once.
    ///
    /// # Safety
    /// Until the part is let go, nobody else may read or write these bytes.
    ///
    /// # Panics
    /// When the part ends past the buffer.
    #[allow(clippy::mut_from_ref)] // disjoint, as the caller vouches
    pub unsafe fn part(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: initialised bytes of this buffer, the caller's alone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(offset), len) }
    }
}

impl std::ops::Deref for PinnedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes owned by the value.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl std::ops::DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes owned by the value, borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated in `alloc_pinned`, freed here alone.
            let _ = unsafe { result::free_host(self.ptr.cast()) };
        }
    }
}
