//! Floats in the memory of a device, which threads exchange without the host.
//!
//! Any backend serves. On CubeCL, work runs on streams, and a stream does not always wait for what another one has written.
//! So ranks read each other's memory only if they are on one stream, where work is done in the order in which it is
//! enqueued: [`launch`](crate::launch()) puts them there. Elements of another stream, or of another device, are read back
//! on the stream that wrote them, once for all ranks.

use std::any::Any;
use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::tensor::{DType, FloatDType, Shape, Slice, TensorData};
use burn_backend::tensor::FloatTensor;
use burn_backend::{
    Backend, DeviceOps, Scalar, StreamId, TensorMetadata, get_device_settings, try_read_sync,
};
use burn_fsdp_collectives::engine::{DeviceMemory, Payload, Space, Stretch};
use burn_fsdp_collectives::{
    Account, Buffer, ElementType, ProcessGroup, ReduceOp, Reduction, Source,
};

use crate::element::float_of;

/// Floats on a device, flat.
struct OnDevice<B: Backend> {
    tensor: FloatTensor<B>,
    num_bytes: usize,
    /// The stream on which the elements were written.
    stream: StreamId,
    /// The bytes on the host, read back at most once for all ranks on other devices or streams.
    host: OnceLock<Result<Vec<u8>, String>>,
    /// Counts the bytes as unsharded as long as a rank may still read them.
    _account: Option<Account>,
}

impl<B: Backend> OnDevice<B> {
    fn new(tensor: FloatTensor<B>, account: Option<Account>) -> Self {
        Self {
            num_bytes: tensor.shape().num_elements() * tensor.dtype().size(),
            tensor,
            stream: StreamId::current(),
            host: OnceLock::new(),
            _account: account,
        }
    }

    fn read_back(&self) -> Result<Vec<u8>, String> {
        let data = self
            .stream
            .executes(|| try_read_sync(B::float_into_data(self.tensor.clone())));
        let data = data.ok_or("the backend does not support synchronous reads")?;
        let data = data.map_err(|error| error.to_string())?;
        Ok(data.as_bytes().to_vec())
    }
}

impl<B: Backend> Payload for OnDevice<B> {
    fn len(&self) -> usize {
        self.num_bytes
    }

    fn space(&self) -> Space {
        space_of::<B>(&self.tensor.device())
    }

    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn read(&self) -> Result<Cow<'_, [u8]>, String> {
        let host = self.host.get_or_init(|| self.read_back());
        host.as_deref().map(Cow::Borrowed).map_err(String::clone)
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A device's memory, through one backend.
struct Memory<B: Backend> {
    device: B::Device,
}

impl<B: Backend> fmt::Debug for Memory<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:?})", self.device)
    }
}

impl<B: Backend> Memory<B> {
    /// Returns the elements of a stretch in this memory, ready for the current stream.
    fn piece(&self, stretch: &Stretch<'_>, dtype: FloatDType) -> Result<FloatTensor<B>, String> {
        let dtype = DType::from(dtype);
        let elements = stretch.given.start / dtype.size()..stretch.given.end / dtype.size();
        let payload = stretch.source.payload().map(Payload::as_any);
        let given = payload.and_then(<dyn Any>::downcast_ref::<OnDevice<B>>);
        // Copies from device to device, as CubeCL 0.11.3 makes them, may end before they are complete.
        let is_here = |given: &&OnDevice<B>| {
            given.tensor.device() == self.device && given.stream == StreamId::current()
        };
        let Some(given) = given.filter(is_here) else {
            let bytes = stretch.source.read()?[stretch.given.clone()].to_vec();
            let data = TensorData::from_bytes_vec(bytes, [elements.len()], dtype);
            return Ok(B::float_from_data(data, &self.device));
        };
        if given.tensor.dtype() != dtype {
            let found = given.tensor.dtype();
            return Err(format!("a tensor of {found:?}, announced as {dtype:?}"));
        }
        let tensor = given.tensor.clone();
        Ok(if elements == (0..tensor.shape().num_elements()) {
            tensor
        } else {
            B::float_slice(tensor, &[Slice::from(elements)])
        })
    }

    fn empty(&self, len: usize, dtype: DType) -> FloatTensor<B> {
        B::float_empty(Shape::from([len]), &self.device, dtype.into())
    }

    /// Copies `piece` into `out`, from element `at`.
    fn assign(&self, out: FloatTensor<B>, at: usize, piece: FloatTensor<B>) -> FloatTensor<B> {
        let range = at..at + piece.shape().num_elements();
        B::float_slice_assign(out, &[Slice::from(range)], piece)
    }

    fn scaled(tensor: FloatTensor<B>, factor: f64) -> FloatTensor<B> {
        if factor == 1.0 {
            tensor
        } else {
            B::float_mul_scalar(tensor, Scalar::Float(factor))
        }
    }

    /// Combines two addends as [`reduce`](burn_fsdp_collectives::engine::reduce) does: NaN wins over any number.
    fn combined(&self, op: ReduceOp, a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
        let bools = get_device_settings::<B>(&self.device).bool_dtype;
        let wins = match op {
            ReduceOp::Sum | ReduceOp::Mean => return B::float_add(a, b),
            ReduceOp::Max => B::float_greater_equal(a.clone(), b.clone(), bools),
            ReduceOp::Min => B::float_lower_equal(a.clone(), b.clone(), bools),
        };
        let chosen = B::float_mask_where(b, wins, a.clone());
        let is_nan = B::float_is_nan(a.clone(), bools);
        B::float_mask_where(chosen, is_nan, a)
    }
}

impl<B: Backend> DeviceMemory for Memory<B> {
    fn space(&self) -> Space {
        space_of::<B>(&self.device)
    }

    fn join(
        &self,
        element: ElementType,
        len: usize,
        stretches: &[Stretch<'_>],
    ) -> Result<Box<dyn Payload>, String> {
        let dtype = float_of(element).ok_or_else(|| not_float(element))?;
        let size = DType::from(dtype).size();
        let mut out = self.empty(len / size, dtype.into());
        for stretch in stretches.iter().filter(|stretch| !stretch.given.is_empty()) {
            out = self.assign(out, stretch.at / size, self.piece(stretch, dtype)?);
        }
        Ok(Box::new(OnDevice::<B>::new(out, None)))
    }

    fn combine(
        &self,
        reduction: &Reduction,
        element: ElementType,
        addends: &[Stretch<'_>],
    ) -> Result<Box<dyn Payload>, String> {
        let input = float_of(element).ok_or_else(|| not_float(element))?;
        let output = reduction.output_of(element);
        let output = float_of(output).ok_or_else(|| not_float(output))?;
        let wide = match input {
            FloatDType::F64 => FloatDType::F64,
            _ => FloatDType::F32,
        };
        let cast = |tensor: FloatTensor<B>, to: FloatDType| {
            if tensor.dtype() == DType::from(to) {
                tensor
            } else {
                B::float_cast(tensor, to)
            }
        };
        let mut sum = None;
        for addend in addends {
            let addend = cast(self.piece(addend, input)?, wide);
            let addend = Self::scaled(addend, reduction.pre_scale);
            sum = Some(match sum {
                None => addend,
                Some(sum) => self.combined(reduction.op, sum, addend),
            });
        }
        let sum = sum.ok_or("a reduction without ranks")?;
        let share = match reduction.op {
            ReduceOp::Mean => 1.0 / addends.len() as f64,
            _ => 1.0,
        };
        let sum = Self::scaled(sum, reduction.post_scale * share);
        Ok(Box::new(OnDevice::<B>::new(cast(sum, output), None)))
    }
}

/// Lends the first `num_elements` floats of a tensor, in the order of its dims, to the threads of this process. The
/// tensor must not be on the CPU backend. The `account` counts the bytes until no rank reads them anymore.
pub fn device_source<B: Backend>(
    tensor: FloatTensor<B>,
    num_elements: usize,
    account: Option<Account>,
) -> Source {
    if num_elements == 0 {
        return Source::empty();
    }
    let len = tensor.shape().num_elements();
    let flat = B::float_reshape(tensor, Shape::from([len]));
    let flat = if len == num_elements {
        flat
    } else {
        B::float_slice(flat, &[Slice::from(0..num_elements)])
    };
    Source::of(Arc::new(OnDevice::<B>::new(flat, account)))
}

/// Returns a buffer for `len` bytes of floats in the memory of `device`. Nothing is allocated until a collective returns
/// it. An empty buffer is on the host.
pub fn device_buffer<B: Backend>(device: &B::Device, len: usize) -> Buffer {
    if len == 0 {
        return Buffer::in_space(Space::Host, 0);
    }
    let device = device.clone();
    Buffer::in_memory(Arc::new(Memory::<B> { device }), len)
}

/// Returns the flat tensor in a buffer that a collective has returned.
///
/// # Errors
///
/// The buffer itself, if it is empty or not in the memory of a device of `B`.
pub fn device_tensor<B: Backend>(buffer: Buffer) -> Result<FloatTensor<B>, Buffer> {
    let payload = buffer.into_payload()?;
    match payload.as_any().downcast_ref::<OnDevice<B>>() {
        Some(arrived) => Ok(arrived.tensor.clone()),
        None => Err(Buffer::arrived(payload)),
    }
}

/// Runs `body` on a stream that all of its callers share, on each device of CubeCL. Ranks that are threads and share a
/// device then read each other's tensors in place, and their memory comes from one pool.
///
/// With the feature `fusion`, each thread keeps its own stream. Burn looks for operations to fuse in the order of a
/// stream, where those of several ranks would be mixed in another order each time.
pub(crate) fn on_shared_stream<T>(body: impl FnOnce() -> T) -> T {
    if cfg!(feature = "fusion") {
        body()
    } else {
        SHARED.executes(body)
    }
}

/// Returns true if the ranks of `group` can exchange tensors in the memory of devices, and the calling thread is on the
/// stream that the ranks of a [`launch`](crate::launch()) share.
pub fn exchanges_on_devices(group: &ProcessGroup) -> bool {
    group.shares_devices() && StreamId::current() == SHARED
}

/// Threads get the numbers 0, 1 and so on. CubeCL maps them to 128 streams, so only a program with that many threads also
/// uses this one, for other work.
const SHARED: StreamId = StreamId {
    value: (1 << 32) + 127,
};

fn space_of<B: Backend>(device: &B::Device) -> Space {
    let id = device.id();
    Space::Device {
        kind: "device",
        index: usize::from(id.type_id) << u16::BITS | usize::from(id.index_id),
    }
}

fn not_float(element: ElementType) -> String {
    format!("elements of type {element}, which move through the host")
}
