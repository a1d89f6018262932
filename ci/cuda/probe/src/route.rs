//! The way into CubeCL's memory and streams on CUDA: every use of CubeCL's internals is in this file.
//!
//! Burn's tensors are buffers of a server with a thread of its own, one a device, which gets launches through a queue.
//! [`Route::enqueue`] puts a closure into that queue, behind every launch of the calling thread. On the server's thread
//! the pointers and the stream are looked up, and the closure hands work to the driver. The host waits for nothing.
//!
//! # What keeps a pointer valid
//! - The buffers are bound (`BufferBinding`) from the call until the closure has run, so none is freed or moved.
//! - Memory of the current stream may be freed right after: its pool hands it out again to the same stream only, whose
//!   order does the rest.
//! - A buffer that another stream made: the lookup makes this stream wait for that one. After the closure it is looked
//!   up once more, so that CubeCL holds the memory until an event behind our work has come to pass.
//! - Work on a stream of our own ([`Own`]) needs events both ways, and the buffers must be kept until the compute stream
//!   has been told to wait for the work's event.
//!
//! # What keeps a number right
//! A failure that an input carries, or an error of the closure, is passed on to the outputs: to read one then fails.
//! This is done by the scope that CubeCL's own launches use, which also tells a capture of a graph what was written.
//!
//! `Runtime::Server`, the stream's fields and `WriteScoped` are public by accident: versions are pinned.
use std::fmt;

use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::server::{BufferBinding, ServerError, ServerStorage};
use cubecl_common::device::{DeviceId, ServiceId};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_environment::stream::StreamId;
use cubecl_server::runtime::Runtime;
use cubecl_server::stream::{ExecuteScope, FailureStore, WriteScoped, failed_writing};
use cudarc::driver::{result, sys};

type CudaServer = <cubecl_cuda::CudaRuntime as Runtime>::Server;

/// Why the route could not be taken.
#[derive(Debug)]
pub struct RouteError(String);

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RouteError {}

/// An error from anything that can be shown.
pub fn because(what: &str, error: impl fmt::Debug) -> RouteError {
    RouteError(format!("{what}: {error:?}"))
}

/// What a closure on the server's thread may use: raw pointers in device memory and CubeCL's stream.
pub struct Resolved<'a> {
    /// The stream that CubeCL launches this thread's kernels on.
    pub stream: sys::CUstream,
    /// Pointers of the buffers read, in the order given.
    pub reads: &'a [u64],
    /// Pointers of the buffers written, in the order given.
    pub writes: &'a [u64],
}

/// A way to one CUDA device of CubeCL. Cheap to clone; any thread may use it.
#[derive(Clone)]
pub struct Route {
    device: DeviceHandle<CudaServer>,
    context: usize,
}

impl Route {
    /// The way to the device of `client`. Refuses a client of another runtime.
    pub fn new(client: &Client) -> Result<Self, RouteError> {
        let id: DeviceId = client.service_id().device;
        if client.service_id() != ServiceId::of::<CudaServer>(id) {
            return Err(because("no CUDA device of CubeCL", client.name()));
        }
        // CubeCL's device ids count CUDA's ordinals.
        let ordinal =
            result::device::get(i32::from(id.index_id)).map_err(|e| because("the device", e))?;
        // SAFETY: `ordinal` comes from the driver. CubeCL retained the same primary context, so its pointers are ours.
        let context = unsafe { result::primary_ctx::retain(ordinal) }
            .map_err(|e| because("the primary context", e))?;
        let route = Self {
            device: DeviceHandle::new(id),
            context: context as usize,
        };
        route.bind()?;
        Ok(route)
    }

    /// Makes the device's context current on this thread, as calls to the driver need it.
    pub fn bind(&self) -> Result<(), RouteError> {
        // SAFETY: the context was retained in `new` and is never released.
        unsafe { result::ctx::set_current(self.context as sys::CUcontext) }
            .map_err(|e| because("set the context", e))
    }

    /// Enqueues `work` behind every launch of this thread, with the pointers of `reads` and `writes`. Waits for nothing.
    ///
    /// An error of `work`, or a failure that a read buffer carries, shows when a written buffer is read.
    pub fn enqueue<F>(&self, reads: &[&CubeTensor], writes: &[&CubeTensor], work: F)
    where
        F: FnOnce(&Resolved<'_>) -> Result<(), RouteError> + Send + 'static,
    {
        let (stream, reads, writes) = (StreamId::current(), bindings(reads), bindings(writes));
        self.device.submit(move |server| {
            // The error is carried by the written buffers.
            let _ = on_server(server, stream, reads, writes, work);
        });
    }

    /// As [`enqueue`](Self::enqueue), but waits until the server, not the device, has run `work`; returns its result.
    pub fn enqueue_now<F, R>(
        &self,
        reads: &[&CubeTensor],
        writes: &[&CubeTensor],
        work: F,
    ) -> Result<R, RouteError>
    where
        F: FnOnce(&Resolved<'_>) -> Result<R, RouteError> + Send,
        R: Send,
    {
        let (stream, reads, writes) = (StreamId::current(), bindings(reads), bindings(writes));
        self.device
            .submit_blocking(move |server| on_server(server, stream, reads, writes, work))
            .map_err(|e| because("the server's thread", e))?
            .map_err(|e| because("enqueue", e))
    }

    /// Makes the server look at its queue: it takes tasks in batches of 32.
    pub fn flush(&self) {
        self.device.flush_queue();
    }
}

fn bindings(tensors: &[&CubeTensor]) -> Vec<BufferBinding> {
    tensors
        .iter()
        .map(|tensor| tensor.handle.clone().binding())
        .collect()
}

/// Looks the pointers up and runs `work`, on the server's thread.
fn on_server<R>(
    server: &mut CudaServer,
    stream: StreamId,
    reads: Vec<BufferBinding>,
    writes: Vec<BufferBinding>,
    work: impl FnOnce(&Resolved<'_>) -> Result<R, RouteError>,
) -> Result<R, ServerError> {
    let mut pointers = Vec::with_capacity(reads.len() + writes.len());
    let mut held = Vec::with_capacity(pointers.capacity());
    for (place, binding) in reads.iter().chain(&writes).enumerate() {
        // Refuses a buffer that carries a failure, sets the context, and makes the stream wait for the buffer's own.
        let mut resource = server.get_resource(binding.clone(), stream);
        if resource.is_err() && place >= reads.len() {
            // A failure that an output carries is about to be written over.
            server.write_streams().written(std::iter::once(binding));
            resource = server.get_resource(binding.clone(), stream);
        }
        match resource {
            Ok(resource) => {
                pointers.push(resource.resource().ptr);
                held.push(resource);
            }
            Err(error) => {
                failed_writing(server, stream, writes, error.clone());
                return Err(error);
            }
        }
    }
    let raw = server.write_streams().try_stream_mut(&stream);
    let Some(raw) = raw.map(|stream| stream.sys) else {
        let error = refusal("this thread has no stream yet: give a buffer".into());
        failed_writing(server, stream, writes, error.clone());
        return Err(error);
    };
    let foreign: Vec<_> = reads
        .iter()
        .chain(&writes)
        .filter(|b| b.stream != stream)
        .cloned()
        .collect();
    let (read, written) = pointers.split_at(reads.len());
    let resolved = Resolved {
        stream: raw,
        reads: read,
        writes: written,
    };
    let outcome = ExecuteScope::over(server, stream, writes)
        .execute(|_| work(&resolved).map_err(|error| refusal(error.0)));
    for binding in foreign {
        // Behind the work: CubeCL now holds the memory until an event of this stream that comes after it.
        let _ = server.get_resource(binding, stream);
    }
    drop(held);
    outcome.into_result()
}

fn refusal(reason: String) -> ServerError {
    ServerError::Generic {
        reason,
        backtrace: Default::default(),
    }
}

/// An event of CUDA.
pub struct Event(sys::CUevent);

// SAFETY: the driver allows events in any thread of the process.
unsafe impl Send for Event {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Event {}

impl Event {
    /// A new event. The context must be current ([`Route::bind`]).
    pub fn new() -> Result<Self, RouteError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        Ok(Self(
            result::event::create(flags).map_err(|e| because("create an event", e))?,
        ))
    }

    /// Marks what `stream` was given so far.
    pub fn record(&self, stream: sys::CUstream) -> Result<(), RouteError> {
        // SAFETY: the event lives, and the stream is CubeCL's or our own; neither is destroyed while the process runs.
        unsafe { result::event::record(self.0, stream) }.map_err(|e| because("record an event", e))
    }

    /// Makes `stream` wait for the last mark. It must have been recorded before: to wait for none is to wait for nothing.
    pub fn hold(&self, stream: sys::CUstream) -> Result<(), RouteError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: as in `record`.
        unsafe { result::stream::wait_event(stream, self.0, flags) }
            .map_err(|e| because("wait for an event", e))
    }

    /// Whether the last mark has come to pass.
    pub fn is_done(&self) -> bool {
        // SAFETY: the event lives.
        unsafe { result::event::query(self.0) }.is_ok()
    }

    /// Blocks this thread until the last mark has come to pass.
    pub fn wait(&self) -> Result<(), RouteError> {
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.0) }
            .map_err(|e| because("wait for an event on the host", e))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: destroyed once; the driver keeps what is pending.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// A stream of our own, for communication. Lives as long as the process.
#[derive(Clone, Copy)]
pub struct Own(sys::CUstream);

// SAFETY: the driver allows streams in any thread of the process.
unsafe impl Send for Own {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Own {}

impl Own {
    /// A new stream that does not wait for the default one. The context must be current ([`Route::bind`]).
    pub fn new() -> Result<Self, RouteError> {
        let kind = result::stream::StreamKind::NonBlocking;
        Ok(Self(
            result::stream::create(kind).map_err(|e| because("create a stream", e))?,
        ))
    }

    /// The driver's stream.
    pub fn raw(self) -> sys::CUstream {
        self.0
    }
}

/// Copies `bytes` from one device pointer to another on `stream`.
///
/// # Safety
/// Both must be valid for `bytes` until the copy is done.
pub unsafe fn copy(
    to: u64,
    from: u64,
    bytes: usize,
    stream: sys::CUstream,
) -> Result<(), RouteError> {
    // SAFETY: the caller's.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream) }.map_err(|e| because("copy", e))
}

/// Bytes of the device in use by anyone, as the driver counts. The context must be current.
pub fn used_bytes() -> Result<u64, RouteError> {
    let memory = result::mem_get_info().map_err(|e| because("memory in use", e));
    memory.map(|(free, total)| (total - free) as u64)
}
