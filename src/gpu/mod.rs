//! CUDA through the driver alone: devices, memory, streams, kernels.
//!
//! The driver's library is opened at run time, so a program with this module starts on a machine
//! that has none; [`Device::open`] then says so in one line. Every handle keeps its device's
//! primary context alive, the one that PyTorch and the CUDA runtime use in the same process.

#[cfg(feature = "convert")]
pub mod batch;
pub mod blake3;
#[cfg(feature = "convert")]
pub mod decode;
mod image;
mod memory;

pub use memory::{DeviceBuffer, PinnedBuffer};

use crate::error::{Error, Result};
use crate::sync;
use cudarc::driver::{CudaContext, DriverError, result, sys};
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// The oldest driver interface that reads our PTX (ISA 8.0, the first to know `sm_90`): CUDA 12.0.
const MIN_DRIVER: i32 = 12000;

/// What is known of one GPU.
#[derive(Clone, Debug)]
pub struct Info {
    /// The driver's number for it, from 0, after `CUDA_VISIBLE_DEVICES`.
    pub ordinal: usize,
    /// Marketing name.
    pub name: String,
    /// Bytes of device memory.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub compute: (i32, i32),
    /// PCI address as /sys spells it, `0000:1b:00.0`.
    pub pci: String,
    /// The NUMA node its PCI slot hangs on, where the system says.
    pub numa_node: Option<usize>,
    /// Seconds in which the driver's library was opened and started, almost none after the first time in
    /// a process.
    pub driver_seconds: f64,
    /// Seconds in which the context was made.
    pub context_seconds: f64,
}

/// One GPU with its primary context. Cheap to clone; usable from any thread.
#[derive(Clone)]
pub struct Device {
    context: Arc<CudaContext>,
    info: Arc<Info>,
    /// Page-locked buffers that wait for their next use. Locking 1 MiB takes half a millisecond,
    /// so a loader keeps its buffers, as PyTorch's allocator does; the last clone frees them.
    spare: Arc<Mutex<Vec<PinnedBuffer>>>,
}

/// How many GPUs the driver offers; an error that says why when it offers none.
pub fn count() -> Result<usize> {
    // SAFETY: opening the library runs its initialisers, nothing else; every CUDA program does it.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::device(
            "CUDA",
            "libcuda.so.1 not found: install the NVIDIA driver, or use the CPU",
        ));
    }
    result::init().map_err(|e| match e.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Error::device("CUDA", "the driver finds no GPU: use the CPU"),
        _ => failed("CUDA", "start the driver", e),
    })?;
    let mut version = 0;
    // SAFETY: writes one int through a valid pointer.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(|e| failed("CUDA", "ask the driver's version", e))?;
    if version < MIN_DRIVER {
        return Err(Error::device(
            "CUDA",
            format!(
                "the driver knows CUDA {}.{}, {}.{} is the oldest that will do: update the NVIDIA driver",
                version / 1000,
                version % 1000 / 10,
                MIN_DRIVER / 1000,
                MIN_DRIVER % 1000 / 10
            ),
        ));
    }
    match result::device::get_count() {
        Ok(0) => Err(Error::device("CUDA", "the driver finds no GPU: use the CPU")),
        Ok(n) => Ok(n as usize),
        Err(e) => Err(failed("CUDA", "count the GPUs", e)),
    }
}

impl Device {
    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// One line each for: no driver library, a driver older than CUDA 12.0, no GPU, no such GPU.
    pub fn open(ordinal: usize) -> Result<Device> {
        let start = Instant::now();
        let count = count()?;
        let driver_seconds = start.elapsed().as_secs_f64();
        let name = format!("cuda:{ordinal}");
        if ordinal >= count {
            return Err(Error::device(name, format!("no such GPU, the driver offers {count} (from 0)")));
        }
        let context = CudaContext::new(ordinal).map_err(|e| failed(&name, "open the GPU", e))?;
        let context_seconds = start.elapsed().as_secs_f64() - driver_seconds;
        let fail = |e| failed(&name, "ask the GPU's properties", e);
        let pci = pci_address(&context).map_err(fail)?;
        let numa_node = std::fs::read_to_string(format!("/sys/bus/pci/devices/{pci}/numa_node"))
            .ok()
            .and_then(|s| s.trim().parse::<usize>().ok()); // -1: the system does not know
        let info = Info {
            ordinal,
            name: context.name().map_err(fail)?,
            memory: context.total_mem().map_err(fail)? as u64,
            compute: context.compute_capability().map_err(fail)?,
            pci,
            numa_node,
            driver_seconds,
            context_seconds,
        };
        Ok(Device { context, info: Arc::new(info), spare: Arc::default() })
    }

    /// Opens those GPUs of `ordinals` that the driver offers, all at once.
    pub fn open_all(ordinals: Range<usize>) -> Result<Vec<Device>> {
        let end = ordinals.end.min(count()?);
        std::thread::scope(|scope| {
            let opening: Vec<_> =
                (ordinals.start..end).map(|i| scope.spawn(move || Device::open(i))).collect();
            opening.into_iter().map(sync::join).collect()
        })
    }

    /// What is known of it.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Bytes of device memory that are free now.
    pub fn free_memory(&self) -> Result<u64> {
        let (free, _) = self.context.mem_get_info().map_err(|e| self.failed("ask the free memory", e))?;
        Ok(free as u64)
    }

    /// Makes this GPU the calling thread's current one. The other calls here do so themselves.
    pub fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|e| self.failed("use the GPU in this thread", e))
    }

    /// Waits for all work on this GPU's context.
    pub fn synchronize(&self) -> Result<()> {
        self.context.synchronize().map_err(|e| self.failed("finish", e))
    }

    /// A new stream that does not wait for the default stream.
    pub fn stream(&self) -> Result<Stream> {
        self.bind()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|e| self.failed("create a stream", e))?;
        Ok(Stream { device: self.clone(), raw })
    }

    /// A new event; `timed` when [`Event::seconds_since`] is to be asked.
    pub fn event(&self, timed: bool) -> Result<Event> {
        self.bind()?;
        let flags = if timed {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        let raw = result::event::create(flags).map_err(|e| self.failed("create an event", e))?;
        Ok(Event { device: self.clone(), raw })
    }

    /// Loads a cubin, or PTX that ends with a zero byte: an image that scripts/build_kernels.py made.
    fn module(&self, image: &[u8]) -> Result<Module> {
        self.bind()?;
        // SAFETY: an image of our own compiler, whole; the module owns what is loaded and unloads it once.
        let raw = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(|e| match e.0 {
            sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | sys::CUresult::CUDA_ERROR_INVALID_PTX => {
                Error::device(
                    self,
                    format!(
                        "{} has compute capability {}.{}; 8.0 is the oldest that will do",
                        self.info.name, self.info.compute.0, self.info.compute.1
                    ),
                )
            }
            _ => self.failed("load the kernels", e),
        })?;
        Ok(Module(Arc::new(ModuleInner { device: self.clone(), raw })))
    }

    fn failed(&self, action: &str, error: DriverError) -> Error {
        failed(&self.to_string(), action, error)
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.info.ordinal)
    }
}

fn failed(subject: &str, action: &str, error: DriverError) -> Error {
    let text = |r: std::result::Result<&std::ffi::CStr, DriverError>| {
        r.map_or_else(|_| "unknown".to_owned(), |s| s.to_string_lossy().into_owned())
    };
    Error::device(
        subject,
        format!("cannot {action}: {} ({})", text(error.error_string()), text(error.error_name())),
    )
}

fn pci_address(context: &CudaContext) -> std::result::Result<String, DriverError> {
    let mut text = [0u8; 32];
    // SAFETY: the driver writes at most `len` bytes, zero-terminated, into `text`.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), text.len() as i32, context.cu_device()) }
        .result()?;
    let end = text.iter().position(|&b| b == 0).unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..end]).to_lowercase())
}

/// An ordered queue of work on one GPU.
pub struct Stream {
    device: Device,
    raw: sys::CUstream,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: the driver locks its own streams.
unsafe impl Sync for Stream {}

impl Stream {
    /// Queues a copy of `len` bytes from the host to the device address `dst`.
    ///
    /// # Safety
    /// `src` must be readable, unchanged and allocated, and `dst` device memory of this GPU, for
    /// `len` bytes until the stream has passed this point. From memory that is not page-locked
    /// the call may wait.
    pub unsafe fn copy_to_device(&self, dst: u64, src: *const u8, len: usize) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the caller keeps both ranges valid.
        unsafe { sys::cuMemcpyHtoDAsync_v2(dst, src.cast(), len, self.raw) }
            .result()
            .map_err(|e| self.device.failed("copy to the GPU", e))
    }

    /// Queues a copy of `len` bytes from the device address `src` to the host.
    ///
    /// # Safety
    /// As [`Stream::copy_to_device`], with `dst` writable and read by nobody meanwhile.
    pub unsafe fn copy_from_device(&self, dst: *mut u8, src: u64, len: usize) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the caller keeps both ranges valid.
        unsafe { sys::cuMemcpyDtoHAsync_v2(dst.cast(), src, len, self.raw) }
            .result()
            .map_err(|e| self.device.failed("copy from the GPU", e))
    }

    /// Makes `event` stand for all work queued so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles are alive and of one context.
        unsafe { result::event::record(event.raw, self.raw) }
            .map_err(|e| self.device.failed("record an event", e))
    }

    /// Makes work queued from now on wait for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.bind()?;
        // SAFETY: both handles are alive.
        unsafe {
            result::stream::wait_event(self.raw, event.raw, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }
        .map_err(|e| self.device.failed("wait for an event", e))
    }

    /// Blocks until all queued work is done; reports the first failure of it.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the handle is alive.
        unsafe { result::stream::synchronize(self.raw) }
            .map_err(|e| self.device.failed("finish the queued work", e))
    }

    /// The GPU it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The driver's handle, for other CUDA libraries.
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: created in `stream`, destroyed here alone; queued work still runs to its end.
            let _ = unsafe { result::stream::destroy(self.raw) };
        }
    }
}

/// A point in a stream.
pub struct Event {
    device: Device,
    raw: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: the driver locks its own events.
unsafe impl Sync for Event {}

impl Event {
    /// Blocks until the work it stands for is done.
    pub fn synchronize(&self) -> Result<()> {
        self.device.bind()?;
        // SAFETY: the handle is alive.
        unsafe { result::event::synchronize(self.raw) }
            .map_err(|e| self.device.failed("finish the queued work", e))
    }

    /// Seconds between `start` and this event; both timed, recorded and done.
    pub fn seconds_since(&self, start: &Event) -> Result<f64> {
        self.device.bind()?;
        // SAFETY: both handles are alive.
        unsafe { result::event::elapsed(start.raw, self.raw) }
            .map(|ms| f64::from(ms) / 1e3)
            .map_err(|e| self.device.failed("time the work", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: created in `event`, destroyed here alone.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// Kernels loaded on one GPU; unloaded with the last kernel taken from it.
#[derive(Clone)]
pub struct Module(Arc<ModuleInner>);

struct ModuleInner {
    device: Device,
    raw: sys::CUmodule,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for ModuleInner {}
// SAFETY: never written after creation.
unsafe impl Sync for ModuleInner {}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: loaded in `module`, unloaded here alone.
            let _ = unsafe { result::module::unload(self.raw) };
        }
    }
}

impl Module {
    /// The kernel of that name (`extern "C"` in the source).
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let device = &self.0.device;
        device.bind()?;
        let c_name =
            CString::new(name).map_err(|_| Error::device(device, "a kernel's name with a zero byte"))?;
        // SAFETY: the module is alive, and the kernel keeps it so.
        let raw = unsafe { result::module::get_function(self.0.raw, c_name) }
            .map_err(|e| device.failed("find a kernel", e))?;
        Ok(Kernel { module: self.clone(), raw })
    }
}

/// One kernel.
#[derive(Clone)]
pub struct Kernel {
    module: Module,
    raw: sys::CUfunction,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: never written after creation.
unsafe impl Sync for Kernel {}

/// One kernel argument: a plain number, by value. Pointers go as `u64` device addresses.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub enum Arg {
    U32(u32),
    U64(u64),
}

impl Kernel {
    /// Queues `blocks` blocks of `threads` threads with `shared` bytes of dynamic shared memory.
    ///
    /// # Safety
    /// `args` must match the kernel's parameters in number, order and width, and every address
    /// among them must be device memory that the kernel may use until the stream has passed this
    /// point.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        shared: u32,
        args: &[Arg],
    ) -> Result<()> {
        stream.device.bind()?;
        let mut values = args.to_vec();
        let mut params: Vec<*mut c_void> = values
            .iter_mut()
            .map(|a| match a {
                Arg::U32(v) => std::ptr::from_mut(v).cast(),
                Arg::U64(v) => std::ptr::from_mut(v).cast(),
            })
            .collect();
        // SAFETY: the caller vouches for the arguments; the driver copies them before it returns.
        unsafe {
            result::launch_kernel(self.raw, (blocks, 1, 1), (threads, 1, 1), shared, stream.raw, &mut params)
        }
        .map_err(|e| self.module.0.device.failed("start a kernel", e))
    }
}

#[cfg(test)]
mod tests {
    /// Without a driver every entry says so instead of panicking; with one it opens.
    #[test]
    fn a_missing_driver_is_a_plain_error() {
        match super::Device::open(0) {
            Ok(device) => assert!(device.info().memory > 0),
            Err(e) => {
                let text = e.to_string();
                assert!(text.starts_with("CUDA: ") || text.starts_with("cuda:0: "), "{text}");
                assert_eq!(text.lines().count(), 1);
            }
        }
    }
}
